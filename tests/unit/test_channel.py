"""Trajectories as they travel: nothing is lost, and what does not fit its own head is refused."""

from __future__ import annotations

import numpy as np
import pytest

from rpipe.core.types import Sequences, Trajectory, TrajectoryId, VersionSpan
from rpipe.runtime.channel import ChannelError, pack, unpack


def group(logprobs: bool = True) -> Sequences:
    def one(sample: int, prompt: list[int], output: list[int]) -> Trajectory:
        spans = (VersionSpan(0, len(output), 4),)
        probs = -np.arange(1, len(output) + 1, dtype=np.float32)
        return Trajectory(TrajectoryId(7, sample), np.array(prompt), np.array(output), probs, spans, "stop")

    made = Sequences.of([one(0, [5, 6], [7, 8, 9]), one(1, [5, 6], []), one(2, [5, 6], [1])], [1.0, 0.0, 0.5], [0.9, -1.0, 0.1])
    return made if logprobs else Sequences(*[getattr(made, n) for n in made.__slots__[:-1]], logprobs=None)


@pytest.mark.parametrize("logprobs", [True, False])
def test_what_is_unpacked_is_what_was_packed(logprobs):
    sent, spans = group(logprobs), np.array([[0, 0, 3, 4], [2, 0, 1, 4]], np.int32)
    found, found_spans = unpack(pack(sent, spans))
    assert np.array_equal(found_spans, spans)
    for name in sent.__slots__:
        ours, theirs = getattr(sent, name), getattr(found, name)
        assert (ours is None and theirs is None) or (np.array_equal(ours, theirs) and ours.dtype == theirs.dtype), name


def test_the_loss_is_on_response_tokens_alone_and_log_probs_stand_beside_them():
    made = group()
    assert made.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 1]
    assert made.logprobs is not None and made.logprobs.tolist() == [0, 0, -1, -2, -3, 0, 0, 0, 0, -1]
    assert made.lengths.tolist() == [5, 2, 3] and made.tokens == 10 and made.trained_tokens == 4


def test_chosen_rows_keep_their_own_tokens_in_the_order_asked_for():
    chosen = group().select([2, 0])
    assert chosen.token_ids.tolist() == [5, 6, 1, 5, 6, 7, 8, 9]
    assert chosen.rewards.tolist() == [0.5, 1.0] and chosen.prompt_lengths.tolist() == [2, 2]


def test_joined_parts_are_the_rows_of_all():
    made = group()
    joined = Sequences.concatenate([made.select([0]), made.select([1, 2])])
    assert joined.token_ids.tolist() == made.token_ids.tolist() and joined.count == 3


def test_parts_with_and_without_log_probs_do_not_mix():
    with pytest.raises(ValueError, match="with and without log-probs"):
        Sequences.concatenate([group(), group(logprobs=False)])


def test_a_torn_group_is_refused():
    with pytest.raises(ChannelError, match="takes 154 bytes, 153 came"):
        unpack(pack(group())[:-1])

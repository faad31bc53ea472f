"""The environment between two turns: what it may answer, what is trained, and what its faults cost."""

from __future__ import annotations

import numpy as np
import pytest

from rpipe.control.state import GroupRecord, TrajectoryRecord
from rpipe.core.types import Prompt, Sequences, Trajectory, TrajectoryId, VersionSpan
from rpipe.rollout.environments import calculator
from rpipe.rollout.held import HeldGroup, Part
from tests.sim.simulated import config
from tests.unit.test_rewards import with_pool

PROMPT = Prompt("p", (7, 8), "2+3=", "5", "last_integer", {"level": 2})


@pytest.mark.parametrize(
    "text, answer",
    [
        ("I ask <<12+30*2>>", "[72]"),
        ("<<(2-5)*-4>>\n", "[12]"),
        ("<<7//2>>", "[3]"),
        ("<<1/0>>", "[?]"),
        ("<<7//0>>", "[?]"),
        ("<<9**9>>", "[?]"),
        ("<<999999999999*999>>", "[?]"),
        ("<<__import__('os')>>", "[?]"),
        ("<<True+1>>", "[?]"),
        ("<<>>", None),
        ("it is <<1+1>> then", None),
        ("5", None),
    ],
)
def test_the_calculator_answers_whole_numbers_and_runs_nothing(text, answer):
    assert calculator("", ["<<1+1>>", "[2]", text], {}) == answer


def repeats(prompt, texts, metadata):
    """Answers once."""
    return f"{prompt}|{'/'.join(texts)}|{metadata['level']}{metadata['answer']}" if len(texts) == 1 else None


def empty(prompt, texts, metadata):
    return ""


def number(prompt, texts, metadata):
    return 5


def raises(prompt, texts, metadata):
    raise KeyError("no such tool")


def hangs(prompt, texts, metadata):
    import time

    time.sleep(60)


def ask(name, texts, **settings):
    return with_pool(lambda pool: pool.answer(f"{__name__}:{name}", PROMPT, texts), **settings)


def test_an_environment_sees_prompt_turns_and_metadata_and_ends_with_none():
    said = ask("repeats", ["hi"])
    assert (said.text, said.error) == ("2+3=|hi|25", "")
    assert (ask("repeats", ["hi", "a", "b"]).text, ask("repeats", ["hi", "a", "b"]).error) == (None, "")


def test_the_built_in_one_is_found_by_its_short_name():
    settings = config(rollout={"environment": "calculator", "max_turns": 2})
    said = with_pool(lambda pool: pool.answer(settings.environment_function, PROMPT, ["<<2+3>>"]))
    assert (said.text, said.error) == ("[5]", "")


@pytest.mark.parametrize(
    "rollout, words",
    [
        ({"max_turns": 2}, "rollout.max_turns = 2 wants rollout.environment"),
        ({"environment": "calculator"}, "rollout.environment = calculator wants rollout.max_turns of at least 2"),
        ({"environment": "calclator", "max_turns": 2}, "wanted: calculator or package.module:function"),
    ],
)
def test_half_a_setting_is_refused(rollout, words):
    with pytest.raises(ValueError, match=words):
        config(rollout=rollout)


@pytest.mark.parametrize(
    "name, error",
    [
        ("empty", "returned ''; wanted: a text, or None where the trajectory is done"),
        ("number", "returned 5; wanted: a text"),
        ("raises", "KeyError: 'no such tool'"),
        ("hangs", "exceeded 0.5 s (reward.deadline_s)"),
    ],
)
def test_what_is_no_answer_is_an_error_that_names_the_environment(name, error):
    said = ask(name, ["hi"], deadline_s=0.5)
    assert said.text is None and said.error.startswith(f"environment {__name__}:{name}") and error in said.error


def part(ids, version=3):
    return Part(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), ((0, len(ids), version),) if ids else ())


def two_turns(last=(5, 6)):
    held = HeldGroup(PROMPT, 1)
    held.take(0, part([1, 2]))
    held.join(TrajectoryId(0, 0), "stop")
    held.answered(0, [9, 9, 9])
    assert held.tokens_so_far(0).tolist() == [7, 8, 1, 2, 9, 9, 9]
    held.take(0, part(list(last[:1])))  # an engine is lost after its first token
    assert held.tokens_so_far(0).tolist() == [7, 8, 1, 2, 9, 9, 9, *last[:1]]
    held.take(0, part(list(last[1:])))
    return held, held.join(TrajectoryId(0, 0), "stop")


def words(ids):
    return "".join(f"{i}" for i in ids)


def test_answers_are_in_the_response_and_never_trained():
    held, trajectory = two_turns()
    assert trajectory.output_ids.tolist() == [1, 2, 9, 9, 9, 5, 6]
    assert trajectory.versions == (VersionSpan(0, 2, 3), VersionSpan(5, 7, 3))
    assert held.read(0, words) == ["12", "999", "56"]
    sequences = Sequences.of([trajectory], [1.0], [0.5])
    assert sequences.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert sequences.logprobs is not None and sequences.logprobs.tolist() == [0, 0, -0.5, -0.5, 0, 0, 0, -0.5, -0.5]
    assert sequences.trained_tokens == 4


def test_a_turn_cut_before_its_first_token_leaves_an_empty_last_turn():
    held, trajectory = two_turns(last=())
    assert trajectory.pieces == [(0, 2), (2, 5), (5, 5)]
    assert held.read(0, words) == ["12", "999", ""]


def test_an_answer_after_which_no_turn_follows_is_not_part_of_the_response():
    held = HeldGroup(PROMPT, 1)
    held.take(0, part([1, 2]))
    held.join(TrajectoryId(0, 0), "stop")
    held.answered(0, [9] * 50)
    assert held.read(0, words) == ["12"] and [len(t.output_ids) for t in held.finished()] == [2]


def test_a_group_kept_for_a_later_attempt_comes_back_with_its_turns_and_mask():
    held, trajectory = two_turns()
    again = HeldGroup.of(PROMPT, held.kept(4), words)
    assert again.texts == [["12", "999", "56"]]
    assert isinstance(again.trajectories[0], Trajectory)
    assert again.trajectories[0].sampled.tolist() == trajectory.sampled.tolist()
    spec = again.spec(4)
    assert (spec.output_tokens, spec.finishes, spec.turns) == ((7,), ("stop",), (2,))


def test_the_coordinator_counts_the_bytes_that_its_groups_take_on_the_channel():
    record = GroupRecord(4, 0, len(PROMPT.token_ids), [TrajectoryRecord(turn=1, output_tokens=7)])
    data, _ = two_turns()[0].packed((1.0,), (0.5,))
    assert record.channel_bytes == len(data)

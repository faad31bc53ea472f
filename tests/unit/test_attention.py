"""Does attention over buckets of padded sequences equal attention of each sequence alone?"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rpipe.training import attention

LENGTHS = [5, 300, 1, 40, 41, 7, 120, 300, 2]


def test_every_sequence_is_in_one_bucket_and_little_is_padded() -> None:
    buckets = attention.bucket_lengths(LENGTHS)
    assert sorted(i for b in buckets for i in b) == list(range(len(LENGTHS)))
    for members in buckets:
        longest = LENGTHS[members[0]]
        assert all(longest - LENGTHS[i] <= max(attention.SLACK_TOKENS, longest * (1 - attention.FILL)) for i in members)


@pytest.mark.parametrize("lengths", [LENGTHS, [64], [3, 3, 3], [1]])
def test_bucket_attention_equals_each_sequence_alone(lengths: list[int]) -> None:
    torch.manual_seed(0)
    tokens = sum(lengths)
    shapes = [(tokens, 1, 4, 8), (tokens, 1, 2, 8), (tokens, 1, 2, 8)]  # two query heads share a key head
    q, k, v = (torch.randn(s, requires_grad=True) for s in shapes)
    core = attention.BucketAttention(SimpleNamespace(kv_channels=8, context_parallel_size=1), layer_number=1)
    out = core(q, k, v, packed_seq_params=attention.pack(lengths, torch.device("cpu"), "buckets"))
    out.square().sum().backward()
    seen = [out.detach(), q.grad, k.grad, v.grad]
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    rows = zip(*(x.squeeze(1).split(lengths) for x in (q, k, v)))
    alone = []
    for row in rows:
        heads_first = [x.transpose(0, 1) for x in row]
        one = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=8**-0.5, enable_gqa=True)
        alone.append(one.transpose(0, 1))
    out = torch.cat(alone).reshape(tokens, 1, -1)
    out.square().sum().backward()
    for a, b in zip(seen, [out.detach(), q.grad, k.grad, v.grad]):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_sequences_that_were_not_packed_here_are_refused() -> None:
    core = attention.BucketAttention(SimpleNamespace(kv_channels=8, context_parallel_size=1), layer_number=1)
    x = torch.zeros(3, 1, 2, 8)
    with pytest.raises(RuntimeError, match=r"packed by attention\.pack"):
        core(x, x, x)


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_every_position_is_on_one_context_parallel_rank_and_all_attend_to_as_much(cp: int) -> None:
    for length in (1, 7, 24):
        parts = [attention.chunks(length, cp, rank) for rank in range(cp)]
        whole = np.sort(np.concatenate(parts))
        assert whole.tolist() == list(range(len(whole))) and length <= len(whole) < length + 2 * cp
        assert len({int((part + 1).sum()) for part in parts}) == 1  # keys seen by a rank's queries


@pytest.mark.parametrize("lengths", [LENGTHS, [1], [8, 3]])
def test_attention_cut_over_ranks_equals_the_whole(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks' queries in turn, each against the keys of both."""
    torch.manual_seed(0)
    cpu, whole = torch.device("cpu"), attention.pack(lengths, torch.device("cpu"), "buckets")
    q, k, v = (torch.randn(sum(lengths), 1, heads, 8) for heads in (4, 2, 2))
    core = attention.BucketAttention(SimpleNamespace(kv_channels=8, context_parallel_size=1), layer_number=1)
    wanted = core(q, k, v, packed_seq_params=whole).split(lengths)

    def cut(x: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank holds of packed sequences, padded with rows that must not matter."""
        parts = []
        for one in x.split(lengths):
            at = torch.from_numpy(attention.chunks(len(one), 2, rank))
            parts.append(torch.cat([one, torch.full((4, *one.shape[1:]), 9.0)])[at])
        return torch.cat(parts)

    kept = {id(part): torch.cat([cut(x, 0), cut(x, 1)]).squeeze(1) for x in (k, v) for part in [x]}
    for rank in range(2):
        found = iter([kept[id(k)], kept[id(v)]])
        monkeypatch.setattr(attention, "_gathered", lambda x, found=found: next(found))
        core = attention.BucketAttention(SimpleNamespace(kv_channels=8, context_parallel_size=2), layer_number=1)
        packed = attention.pack(lengths, cpu, "buckets", 2, rank)
        out = core(cut(q, rank), cut(k, rank), cut(v, rank), packed_seq_params=packed)
        at = 0
        for one, length in zip(wanted, lengths):
            positions = torch.from_numpy(attention.chunks(length, 2, rank))
            real = positions < length
            torch.testing.assert_close(out[at : at + len(positions)][real], one[positions[real]], atol=1e-5, rtol=1e-5)
            at += len(positions)

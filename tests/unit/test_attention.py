"""Does attention over buckets of padded sequences equal attention of each sequence alone?"""

from __future__ import annotations

from types import SimpleNamespace

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
    core = attention.BucketAttention(SimpleNamespace(kv_channels=8), layer_number=1)
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
    core = attention.BucketAttention(SimpleNamespace(kv_channels=8), layer_number=1)
    x = torch.zeros(3, 1, 2, 8)
    with pytest.raises(RuntimeError, match=r"packed by attention\.pack"):
        core(x, x, x)

"""Invariants of rpipe.policy.batching, on any lengths."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rpipe.policy.batching import FILL, Item, feasible, owners, pack, pipelined

lengths = st.lists(st.integers(1, 5_000), min_size=1, max_size=60)


def items(tokens: list[int]) -> list[Item]:
    return [Item(group=i // 8, sample=i % 8, tokens=t) for i, t in enumerate(tokens)]


@given(lengths, st.integers(1, 9))
def test_every_trajectory_has_exactly_one_owner(tokens, replicas):
    shares = owners(items(tokens), replicas)
    assert len(shares) == replicas
    assert sorted(i for share in shares for i in share) == sorted(items(tokens))


@given(lengths, st.integers(1, 9))
def test_the_heaviest_share_exceeds_the_mean_by_at_most_the_longest_trajectory(tokens, replicas):
    heaviest = max(sum(i.tokens for i in share) for share in owners(items(tokens), replicas))
    assert heaviest <= sum(tokens) / replicas + max(tokens)


@given(lengths, st.integers(1, 6_000))
def test_packing_keeps_order_loses_nothing_and_exceeds_the_budget_only_alone(tokens, budget):
    packed = pack(items(tokens), budget)
    assert [i for batch in packed for i in batch] == items(tokens)
    assert all(len(batch) == 1 or sum(i.tokens for i in batch) <= budget for batch in packed)


@given(lengths, st.integers(1, 6_000))
def test_no_two_neighbours_would_have_fitted_together(tokens, budget):
    packed = pack(items(tokens), budget)
    for left, right in pairwise(packed):
        assert sum(i.tokens for i in left) + right[0].tokens > budget


@given(lengths, st.integers(1, 20_000))
def test_a_feasible_batch_is_the_largest_prefix_of_whole_groups_or_one_that_is_too_large(tokens, budget):
    left = deque(items(tokens))
    taken = feasible(left, budget)
    groups = {i.group for i in taken}
    assert taken and [*taken, *left] == items(tokens) and not groups & {i.group for i in left}
    total = sum(i.tokens for i in taken)
    assert len(groups) == 1 or total <= budget
    if left:
        assert total + sum(i.tokens for i in left if i.group == left[0].group) > budget


@given(lengths, st.integers(1, 6_000), st.integers(2, 4))
def test_a_pipeline_gets_micro_batches_enough_to_fill_it(tokens, budget, stages):
    packed = pipelined(items(tokens), budget, stages)
    assert [i for batch in packed for i in batch] == items(tokens)
    assert all(len(batch) == 1 or sum(i.tokens for i in batch) <= budget for batch in packed)
    assert len(packed) >= len(pack(items(tokens), budget))
    if len(set(tokens)) == 1:
        assert len(packed) >= min(len(tokens), FILL * stages) / 2


def test_with_one_stage_nothing_is_cut_finer():
    few = items([10, 10, 10, 10])
    assert pipelined(few, 100, stages=1) == [few]
    assert [len(batch) for batch in pipelined(few, 100, stages=2)] == [1, 1, 1, 1]

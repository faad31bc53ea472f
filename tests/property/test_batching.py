"""Invariants of rpipe.policy.batching, on any lengths."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rpipe.policy.batching import FILL, Item, at_once, calls, feasible, heaviest, owners, pack, pipelined

lengths = st.lists(st.integers(1, 5_000), min_size=1, max_size=60)
peers = st.sampled_from([1, 2, 3, 8])


def items(tokens: list[int]) -> list[Item]:
    return [Item(group=i // 8, sample=i % 8, tokens=t) for i, t in enumerate(tokens)]


@given(lengths, st.integers(1, 9))
def test_every_trajectory_has_exactly_one_owner(tokens, replicas):
    shares = owners(items(tokens), replicas)
    assert len(shares) == replicas
    assert sorted(i for share in shares for i in share) == sorted(items(tokens))


@given(lengths, st.integers(1, 9))
def test_the_heaviest_share_exceeds_the_mean_by_at_most_the_longest_trajectory(tokens, replicas):
    most = max(sum(i.tokens for i in share) for share in owners(items(tokens), replicas))
    assert most <= sum(tokens) / replicas + max(tokens)


@given(lengths, st.integers(1, 6_000), peers)
def test_packing_keeps_order_loses_nothing_and_exceeds_the_budget_only_by_one_trajectory(tokens, budget, peers):
    packed = pack(items(tokens), budget, peers)
    assert [i for batch in packed for i in batch] == items(tokens)
    for batch in packed:
        assert heaviest(batch, peers) <= max(budget, *(i.tokens for i in batch))
        assert peers > 1 or len(batch) == 1 or sum(i.tokens for i in batch) <= budget


@given(lengths, st.integers(1, 6_000), peers)
def test_no_two_neighbours_would_have_fitted_together(tokens, budget, peers):
    packed = pack(items(tokens), budget, peers)
    for left, right in pairwise(packed):
        together = [*left, right[0]]
        assert heaviest(together, peers) > max(budget, *(i.tokens for i in together))


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


@given(lengths, st.integers(1, 6_000), st.integers(2, 4), peers)
def test_a_pipeline_gets_micro_batches_enough_to_fill_it(tokens, budget, stages, peers):
    packed = pipelined(items(tokens), budget, stages, peers)
    assert [i for batch in packed for i in batch] == items(tokens)
    assert all(heaviest(batch, peers) <= max(budget, *tokens) for batch in packed)
    assert peers > 1 or len(packed) >= len(pack(items(tokens), budget))
    if len(set(tokens)) == peers == 1:
        assert len(packed) >= min(len(tokens), FILL * stages) / 2


def test_with_one_stage_nothing_is_cut_finer():
    few = items([10, 10, 10, 10])
    assert pipelined(few, 100, stages=1) == [few]
    assert [len(batch) for batch in pipelined(few, 100, stages=2)] == [1, 1, 1, 1]


@given(lengths, st.integers(1, 6_000), st.integers(1, 4), peers)
def test_calls_hold_what_was_cut_in_order_and_each_fills_a_pipeline_where_there_is_enough(tokens, budget, stages, peers):
    cut, found = pipelined(items(tokens), budget, stages, peers), calls(items(tokens), budget, stages, peers)
    assert [batch for call in found for batch in call] == cut
    assert calls([], budget, stages, peers) == []
    if len(found) > 1:
        assert all(at_once(stages) <= len(call) < 2 * at_once(stages) for call in found)


def test_peers_share_a_micro_batch_that_leaves_none_of_them_more_than_the_budget():
    nine = items([14_000] * 9)  # of 126,000 tokens, 8 x 16,384 would hold all: one peer would get 28,000
    assert [len(batch) for batch in pack(nine, 16_384, 8)] == [8, 1]
    uneven = items([20_000, 9_000, 9_000, 9_000])
    assert [len(batch) for batch in pack(uneven, 16_384, 2)] == [3, 1], "no longer than the longest"
    assert [len(batch) for batch in pipelined(items([100] * 16), 10_000, 2, peers=4)] == [4, 4, 4, 4], "and none is left idle"

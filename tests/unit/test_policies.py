"""Admission, placement, batching, advantage: one claim a test."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpipe.policy.admission import Fifo, Frontier, RolloutLoad, SoftFrontier
from rpipe.policy.advantage import dr_grpo, grpo, rloo, shuffled, whitened, zero_variance
from rpipe.policy.batching import Item, owners, pack
from rpipe.policy.placement import GroupAffine, LeastLoaded, Loads
from rpipe.policy.width import Width, widths


def load(**changes) -> RolloutLoad:
    base = {
        "groups_in_service": 2, "trajectories_in_flight": 8, "slots": 32, "kv_tokens_expected": 0, "kv_tokens_capacity": None,
        "groups_ready": 0, "groups_unserved": 16, "groups_untrained": 16,
    }  # fmt: skip
    return RolloutLoad(**{**base, **changes})


def test_fifo_admits_whatever_the_load():
    assert Fifo().admits(load(groups_in_service=500, trajectories_in_flight=4_000, kv_tokens_expected=10**9))


def test_a_hard_frontier_never_holds_more_than_its_width():
    policy = Frontier(frontier_groups=2)
    assert policy.admits(load(groups_in_service=1))
    assert not policy.admits(load(groups_in_service=2))


SOFT = SoftFrontier(frontier_groups=2, groups_per_step=2)
SLOW_ROLLOUT = {"rollout_group_s": 2.0, "train_group_s": 1.0}
SLOW_TRAINING = {"rollout_group_s": 1.0, "train_group_s": 2.0}


def test_a_soft_frontier_is_the_hard_one_until_groups_are_ready_and_wider_by_each_that_is():
    assert SOFT.admits(load(groups_in_service=1, **SLOW_TRAINING))
    assert not SOFT.admits(load(groups_in_service=2, **SLOW_TRAINING))
    assert SOFT.admits(load(groups_in_service=3, groups_ready=1, **SLOW_TRAINING))
    assert not SOFT.admits(load(groups_in_service=4, groups_ready=1, **SLOW_TRAINING))


def test_before_rates_are_known_a_soft_frontier_is_narrow_until_a_group_is_ready():
    assert not SOFT.admits(load(groups_in_service=2))
    assert SOFT.admits(load(groups_in_service=9, groups_ready=1))


def test_where_rollout_is_the_bottleneck_a_soft_frontier_fills_every_slot_and_no_more():
    assert SOFT.admits(load(groups_in_service=9, trajectories_in_flight=31, **SLOW_ROLLOUT))
    assert not SOFT.admits(load(trajectories_in_flight=32, **SLOW_ROLLOUT)), "more would only wait in an engine"


def test_what_is_left_of_each_stage_decides_not_its_rate_alone():
    assert SOFT.pays(load(groups_unserved=6, groups_untrained=16, **SLOW_ROLLOUT), None)
    assert not SOFT.pays(load(groups_unserved=7, groups_untrained=16, **SLOW_ROLLOUT), None)
    assert not SOFT.pays(load(groups_unserved=2, groups_untrained=3, **SLOW_TRAINING), None), (
        "the last step comes after rollout"
    )


WIDTHS = (Width(1, first_s=3.0, lost_s=2.0), Width(2, 1.0, 0.5), Width(3, 2.0, 0.2), Width(4, 4.0, 0.0))


def test_a_width_that_nobody_set_is_the_quickest_and_no_less_than_a_steps_groups():
    auto = SoftFrontier(None, groups_per_step=2)
    assert auto.width(load()) is None and auto.width(load(widths=WIDTHS)) == WIDTHS[1]
    assert SoftFrontier(None, groups_per_step=3).width(load(widths=WIDTHS)) == WIDTHS[2]
    assert SoftFrontier(3, groups_per_step=2).width(load(widths=WIDTHS)) == WIDTHS[2], "three were asked for"
    assert SoftFrontier(9, groups_per_step=2).width(load(widths=WIDTHS)) == WIDTHS[3], "nothing more is known of nine"
    slow = {**SLOW_TRAINING, "widths": WIDTHS}
    assert auto.admits(load(groups_in_service=1, **slow)) and not auto.admits(load(groups_in_service=2, **slow))
    for asked in (3, 9):  # neither rounded nor cut
        policy, later = SoftFrontier(asked, groups_per_step=2), {**slow, "groups_served": 1}
        assert policy.admits(load(groups_in_service=asked - 1, **later))
        assert not policy.admits(load(groups_in_service=asked, **later))


def test_a_first_group_sooner_is_weighed_against_a_rollout_that_ends_later():
    """Sixteen groups, two a step; the first comes 3 s sooner, and rollout loses half a second."""
    auto = SoftFrontier(None, groups_per_step=2)

    def pays(train_group_s: float, rollout_group_s: float = 1.0, **changes) -> bool:
        shown = load(rollout_group_s=rollout_group_s, train_group_s=train_group_s, widths=WIDTHS, **changes)
        return auto.pays(shown, auto.width(shown))

    assert pays(2.0), "training ends last for sure"
    assert pays(1.2), "probably: 21 s against 16"
    assert pays(0.6, 0.1) and not pays(0.5, 0.1), "two groups in 1 s, the next 4 s later: the trainer idles in between"
    assert not pays(0.85), "it ends with rollout: then it waited between groups"
    assert not pays(0.5), "rollout ends last"
    assert not pays(1.0, groups_unserved=15, groups_served=1), "the first group is there: 14 s to train, 15 to roll out"
    caught_up = {"groups_unserved": 9, "groups_untrained": 9, "groups_served": 7}
    assert not pays(1.2, **caught_up) and pays(1.5, **caught_up), "nor does a trainer that caught up make it a beginning again"


def test_nothing_left_to_roll_out_is_no_reason_to_fail():
    done = load(groups_unserved=0, groups_untrained=0, widths=WIDTHS, **SLOW_TRAINING)
    assert not SOFT.pays(done, SOFT.width(done))


def test_widths_weigh_slower_tokens_against_the_shortest_of_more_groups():
    alike, heavy = [100] * 32, [100] * 16 + [1_000] * 16

    def quickest(lengths: list[int], slower: float) -> int:
        found = widths(lengths, lambda batch: 1.0 + slower * batch, most=16, group_slots=8)
        assert [width.groups for width in found] == [1, 2, 3, 4, 6, 8, 12, 16]
        return min(found, key=lambda width: width.first_s).groups

    assert quickest(alike, 0.001) == 1
    assert quickest(heavy, 0.1) == 4
    assert quickest(heavy, 0.001) == 12
    assert quickest(heavy, 0.0) == 16, "more groups cost nothing"


def test_what_a_width_loses_is_the_tokens_that_full_engines_would_have_made_meanwhile():
    one, two = widths([10], lambda batch: 1.0 + batch / 8, most=2, group_slots=8)
    assert (one.first_s, two.first_s) == (20.0, 30.0)
    assert one.lost_s == pytest.approx(20.0 * (1 - (8 / 2.0) / (16 / 3.0))) and two.lost_s == 0.0
    slow_when_full = widths([10], lambda batch: 1.0 if batch <= 8 else 5.0, most=2, group_slots=8)
    assert slow_when_full[0].lost_s == 0.0 and slow_when_full[1].lost_s > 0.0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.sampled_from([1, 2, 3, 4]))
def test_the_least_of_drawn_lengths_is_their_mean_over_all_draws(lengths, width):
    """By brute force: every draw of `width` groups from the past, each as likely."""
    wanted = statistics.fmean(min(draw) for draw in itertools.product(lengths, repeat=width))
    assert widths(lengths, lambda batch: 1.0, width, 1)[-1].first_s == pytest.approx(wanted)


def test_the_kv_budget_is_the_engines_capacity_unless_said():
    assert SOFT.admits(load(**SLOW_ROLLOUT, kv_tokens_expected=999, kv_tokens_capacity=1_000))
    assert not SOFT.admits(load(**SLOW_ROLLOUT, kv_tokens_expected=1_000, kv_tokens_capacity=1_000))
    assert SOFT.admits(load(**SLOW_ROLLOUT, kv_tokens_expected=10**9)), "no budget is known"
    half = SoftFrontier(2, 2, budget_tokens=500)
    assert not half.admits(load(**SLOW_ROLLOUT, kv_tokens_expected=500, kv_tokens_capacity=1_000))
    assert half.admits(load(trajectories_in_flight=0, kv_tokens_expected=10**9)), "nothing would ever run"


def test_least_loaded_takes_the_lowest_number_on_a_tie():
    assert LeastLoaded().place(Loads([2, 1, 1]), sibling=0) == 1


def test_group_affine_follows_its_sibling_however_busy():
    assert GroupAffine().place(Loads([9, 0]), sibling=0) == 0
    assert GroupAffine().place(Loads([9, 0]), sibling=None) == 1


def test_owners_balance_tokens_and_keep_the_given_order_within_a_share():
    items = [Item(0, i, tokens) for i, tokens in enumerate([10, 50, 10, 30])]
    shares = owners(items, 2)
    assert [[i.sample for i in share] for share in shares] == [[1], [0, 2, 3]]


def test_owners_do_not_depend_on_anything_but_the_items():
    items = [Item(3, i, 7) for i in range(5)]
    assert owners(items, 2) == owners(list(items), 2)


def test_a_trajectory_above_the_budget_has_a_micro_batch_of_its_own():
    items = [Item(0, i, t) for i, t in enumerate([4, 40, 4, 4])]
    assert [[i.tokens for i in batch] for batch in pack(items, 10)] == [[4], [40], [4, 4]]


def test_grpo_divides_by_the_sample_standard_deviation():
    found = grpo([1.0, 0.0, 0.0, 0.0])
    deviation = math.sqrt(((0.75) ** 2 + 3 * 0.25**2) / 3)
    assert found == pytest.approx([0.75 / deviation, *[-0.25 / deviation] * 3], rel=1e-5)


def test_dr_grpo_does_not_divide():
    assert dr_grpo([1.0, 0.0]) == (0.5, -0.5)


def test_rloo_compares_with_the_mean_of_the_others():
    rewards = [1.0, 0.0, 0.5, 0.0]
    wanted = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert rloo(rewards) == pytest.approx(wanted)
    assert rloo([1.0]) == (0.0,)


def test_reinforce_pp_whitens_over_all_trajectories_of_all_groups():
    groups = [[1.0, 0.0, 1.0], [0.0, 0.0], [1.0]]
    flat = [r for group in groups for r in group]
    mean = sum(flat) / 6
    deviation = math.sqrt(sum((r - mean) ** 2 for r in flat) / 5)
    found = whitened(groups)
    assert [len(group) for group in found] == [3, 2, 1]
    assert [a for group in found for a in group] == pytest.approx([(r - mean) / deviation for r in flat], rel=1e-5)
    assert whitened([[1.0], [1.0]]) == [(0.0,), (0.0,)]


def test_equal_rewards_give_no_advantage_whatever_rounding_says():
    assert grpo([0.1 + 0.2, 0.3, 0.3]) == (0.0, 0.0, 0.0)
    assert zero_variance([0.1 + 0.2, 0.3])


def test_one_trajectory_has_no_advantage():
    assert grpo([1.0]) == (0.0,)


def test_shuffled_rewards_are_the_same_rewards_in_an_order_that_only_the_key_decides():
    rewards = [float(i) for i in range(8)]
    assert sorted(shuffled(rewards, 5)) == rewards
    assert shuffled(rewards, 5) == shuffled(rewards, 5) != shuffled(rewards, 6)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([-1, 1])), max_size=200))
def test_loads_know_the_least_loaded_engine_whatever_changed(changes):
    loads, counts = Loads([0] * 5), [0] * 5
    for engine, change in changes:
        loads[engine] += change
        counts[engine] += change
        assert loads.least() == min(range(5), key=lambda e: (counts[e], e))
    assert [loads[e] for e in range(len(loads))] == counts

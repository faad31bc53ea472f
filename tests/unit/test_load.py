"""How fast is each stage? What the admission policy is told."""

from __future__ import annotations

import pytest

from rpipe.control.load import Meter
from rpipe.control.pace import Pace


def rollout(meter: Meter, began: float, ends: float, groups: int = 4, training: bool = True, restored: int = 0) -> None:
    meter.requested(began, groups, training, 8)
    for _ in range(restored):
        meter.restored()
    for n in range(groups - restored):
        meter.served(ends if n == groups - restored - 1 else began, 10)


def test_rollouts_rate_is_the_last_whole_training_rollouts() -> None:
    meter = Meter(1, 8, 64)
    assert meter.load(0).rollout_group_s is None
    rollout(meter, 10.0, 18.0)
    assert meter.load(0).rollout_group_s == 2.0
    rollout(meter, 20.0, 32.0)
    assert meter.load(0).rollout_group_s == 3.0


def test_an_evaluation_and_groups_of_an_interrupted_attempt_say_nothing_of_it() -> None:
    """Held-out groups are one response each; what was finished before took no time now."""
    meter = Meter(1, 8, 64)
    rollout(meter, 10.0, 18.0)
    rollout(meter, 20.0, 20.4, training=False)
    rollout(meter, 30.0, 31.0, restored=3)
    assert meter.load(0).rollout_group_s == 2.0


def test_a_runs_first_rollout_is_measured_while_it_runs() -> None:
    """A policy that knew nothing until its end would keep a long first iteration narrow."""
    meter = Meter(1, 8, 64)
    meter.requested(10.0, 4, training=False, trajectories_per_group=8)
    meter.served(11.0, 10)
    assert meter.load(0).rollout_group_s is None, "an evaluation"
    meter.requested(20.0, 4, training=True, trajectories_per_group=8)
    meter.served(26.0, 10)
    assert meter.load(0).rollout_group_s == 6.0
    meter.served(28.0, 10)
    assert meter.load(0).rollout_group_s == 4.0
    meter.requested(40.0, 4, training=True, trajectories_per_group=8)
    meter.served(50.0, 10)
    assert meter.load(0).rollout_group_s == 4.0, "the last whole one"


def test_what_widths_would_do_is_known_from_the_rollouts_before() -> None:
    meter = Meter(2, 16, 64)
    meter.requested(0.0, 4, training=True, trajectories_per_group=4)
    assert meter.load(0).widths == ()
    for batch in (1, 16):  # a token takes 10 ms in any batch
        meter.generated(100, 1.0, batch, batch)
    for longest in (10, 100, 20, 50):
        meter.served(1.0, longest)
    meter.requested(10.0, 4, training=True, trajectories_per_group=4)
    found = meter.load(0).widths
    assert [width.groups for width in found] == [1, 2, 3, 4, 6, 8], "all that fit: 32 slots, 4 a group"
    assert found[0].first_s == pytest.approx(0.45) and min(found, key=lambda width: width.first_s) == found[-1]


def test_pace_finds_the_line_that_turns_were_drawn_from() -> None:
    pace = Pace(1, 32)
    assert pace.widths(8) == ()
    for batch in (1, 4, 9, 30, 64):  # the last waits half in the queue: an engine runs 32
        pace.turn(50, 50 * (0.01 + 0.002 * min(batch, 32)), batch, batch)
    pace.forget()
    assert pace.token_s(1) == pytest.approx(0.012) and pace.token_s(20) == pytest.approx(0.05)
    assert pace.token_s(500) == pace.token_s(32), "the rest would wait"


def test_a_line_through_noise_never_says_that_tokens_take_no_time() -> None:
    pace = Pace(64, 32)  # a group of 8 has an eighth of a slot on each engine
    pace.group(100)
    pace.turn(10, 0.0, 8, 8)
    assert pace.widths(8) == (), "an instant engine says nothing"
    for batch, seconds in ((10, 0.01), (20, 1.0), (30, 2.0)):
        pace.turn(10, seconds, batch, batch)
    assert 0 < pace.token_s(0.125) == pace.token_s(1) < pace.token_s(20)
    assert 20 / pace.token_s(20) >= 1 / pace.token_s(1) * (1 - 1e-9), "more of them never make fewer tokens a second"
    assert all(width.first_s > 0 and width.lost_s >= 0 for width in pace.widths(8))


def test_a_larger_batch_is_never_taken_to_be_faster() -> None:
    pace = Pace(1, 32)
    pace.turn(10, 10.0, 1, 1)
    pace.turn(10, 1.0, 8, 8)
    pace.turn(0, 5.0, 8, 8)  # one token says nothing
    assert pace.token_s(1) == pace.token_s(32) == pytest.approx(0.55)

"""How fast is each stage? What the admission policy is told."""

from __future__ import annotations

from rpipe.control.load import Meter


def rollout(meter: Meter, began: float, ends: float, groups: int = 4, training: bool = True, restored: int = 0) -> None:
    meter.requested(began, groups, training)
    for _ in range(restored):
        meter.restored()
    for n in range(groups - restored):
        meter.served(ends if n == groups - restored - 1 else began)


def test_rollouts_rate_is_the_last_whole_training_rollouts() -> None:
    meter = Meter(8, 64)
    assert meter.load(0).rollout_group_s is None
    rollout(meter, 10.0, 18.0)
    assert meter.load(0).rollout_group_s == 2.0
    rollout(meter, 20.0, 32.0)
    assert meter.load(0).rollout_group_s == 3.0


def test_an_evaluation_and_groups_of_an_interrupted_attempt_say_nothing_of_it() -> None:
    """Held-out groups are one response each; what was finished before took no time now."""
    meter = Meter(8, 64)
    rollout(meter, 10.0, 18.0)
    rollout(meter, 20.0, 20.4, training=False)
    rollout(meter, 30.0, 31.0, restored=3)
    assert meter.load(0).rollout_group_s == 2.0


def test_a_runs_first_rollout_is_measured_while_it_runs() -> None:
    """A policy that knew nothing until its end would keep a long first iteration narrow."""
    meter = Meter(8, 64)
    meter.requested(10.0, 4, training=False)
    meter.served(11.0)
    assert meter.load(0).rollout_group_s is None, "an evaluation"
    meter.requested(20.0, 4, training=True)
    meter.served(26.0)
    assert meter.load(0).rollout_group_s == 6.0
    meter.served(28.0)
    assert meter.load(0).rollout_group_s == 4.0
    meter.requested(40.0, 4, training=True)
    meter.served(50.0)
    assert meter.load(0).rollout_group_s == 4.0, "the last whole one"

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

"""Admission: may the next deferred group's requests enter the engines now?

Groups are asked about in submission order, one at a time, until one is refused.

`fifo` lets every group in at once; the engines queue (RolloutPipe's CGP alone, and the serial baseline).

`frontier` is frontier-group dispatch (RolloutPipe, section 3.3): at most `frontier_groups` groups are in service, those of
lowest submission order. Engines run small batches, so that each token comes sooner and the groups of the next optimizer step
finish first. A group holds its place until its last trajectory is done: where rollout is the bottleneck, engines starve.

`soft_frontier` gives engines as much as they can run at once (every slot, within a budget of KV tokens) unless two things
hold: the trainer would idle soon, and rollout can afford smaller batches. Then it is a frontier, as wide as brings the first
group soonest (`quickest_width`; or as `frontier_groups` says) and WIDEN wider by every group that waits for the trainer.
Rollout can afford it while what is left to roll out, and MARGIN more, takes less time than what is left to train before the
last step, at the rates measured so far; training begins when the last rollout's first group was there. Before rates are
known, at a run's very beginning, rollout can afford it until a group waits for the trainer. Where rollout is the bottleneck
this is fifo admission without the requests that would only wait in an engine; where training is, the first step's groups come
nearly as early as the paper's frontier brings them. In both the engines' queues are ordered by priority, minus the submission
order: what is backfilled never starts before the frontier.

KV tokens are what trajectories in flight are *expected* to need: prompt and the mean length of finished responses. That is
cheap to get wrong: what does not fit after all waits in its engine's queue, which starts a request only when there is room,
in priority order; nothing that runs is evicted for it.

Invariants (tests/unit/test_policies.py and tests/property/test_coordinators.py assert them):
- groups enter in submission order, each once;
- a hard frontier never has more than `frontier_groups` groups in service;
- a soft frontier sends less than one group more than the engines can run at once, and leaves no slot empty for long where
  rollout is the bottleneck;
- with nothing in flight the next group is never refused.

Cost: O(1) a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RolloutLoad:
    """What a decision may look at."""

    groups_in_service: int  # admitted and not serving-complete
    trajectories_in_flight: int  # sent and not finished
    slots: int  # trajectories that all engines together run at once
    kv_tokens_expected: int  # what those in flight are expected to need, prompt and response
    kv_tokens_capacity: int | None  # of all engines; None: not known
    groups_ready: int  # trainable-complete or being scored, and not trained yet
    groups_unserved: int  # of this rollout: not serving-complete
    groups_untrained: int  # of this rollout
    rollout_group_s: float | None = None  # seconds from one serving-complete group to the next, as measured; None: not yet
    train_group_s: float | None = None  # seconds of training for one group, as measured
    training_begins_s: float = 0.0  # after this rollout's begin, as in the last one; 0: it may have begun
    quickest_groups: int = 0  # the width that brings a first group soonest; 0: not known


class Admission(Protocol):
    def admits(self, load: RolloutLoad) -> bool:
        """May the next group enter now?"""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """Every group at once."""

    def admits(self, load: RolloutLoad) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Frontier:
    """The paper's hard frontier."""

    frontier_groups: int  # F_w

    def admits(self, load: RolloutLoad) -> bool:
        return load.groups_in_service < self.frontier_groups


WIDEN = 2  # groups of frontier more for each that waits for the trainer: 1 starves a trainer that is as fast as rollout
MARGIN = 0.1  # of the time left to roll out: rates move, and a rollout's last groups come slower than the others


@dataclass(frozen=True, slots=True)
class SoftFrontier:
    frontier_groups: int | None  # F_w while nothing is ready for the trainer; None: the quickest, no less than a step's
    groups_per_step: int  # U
    budget_tokens: int | None = None  # KV tokens that may be in flight; None: the engines' capacity

    def admits(self, load: RolloutLoad) -> bool:
        if not load.trajectories_in_flight:
            return True
        budget = self.budget_tokens if self.budget_tokens is not None else load.kv_tokens_capacity
        if load.trajectories_in_flight >= load.slots or (budget is not None and load.kv_tokens_expected >= budget):
            return False
        width = self.frontier_groups or max(self.groups_per_step, load.quickest_groups)
        return load.groups_in_service < width + WIDEN * load.groups_ready or not self.has_time(load)

    def has_time(self, load: RolloutLoad) -> bool:
        """Rollout will be done before the last step's training could begin, however small its batches are now.
        Unknown rates: what is there to gain, the first step's groups sooner, is gained when the first of them is ready."""
        if load.rollout_group_s is None or load.train_group_s is None:
            return not load.groups_ready
        train_s = load.training_begins_s + (load.groups_untrained - self.groups_per_step) * load.train_group_s
        return train_s > (1 + MARGIN) * load.groups_unserved * load.rollout_group_s


def quickest_width(longest_tokens: Sequence[int], pace_s: Callable[[float], float], most: int, group_slots: float) -> int:
    """How many groups, run side by side, bring the first of them soonest? A group is done with its longest response; more of
    them make each token later and the least of their longest responses shorter. Narrow is soonest where tokens slow down with
    the batch and lengths are alike, wide where tails are heavy.

    `longest_tokens`: of past groups. `pace_s`: seconds a token, by trajectories that an engine runs. `most`: groups that fill
    all engines. `group_slots`: trajectories of a group on one engine. O(most x groups).
    """
    lengths, n = sorted(longest_tokens), len(longest_tokens)

    def first_s(width: int) -> float:
        least = sum(tokens * (((n - i) / n) ** width - ((n - i - 1) / n) ** width) for i, tokens in enumerate(lengths))
        return least * pace_s(width * group_slots)

    return min(range(1, most + 1), key=first_s)

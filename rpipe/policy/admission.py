"""Admission: may the next deferred group's requests enter the engines now?

Groups are asked about in submission order, one at a time, until one is refused.

`fifo` lets every group in at once; the engines queue (RolloutPipe's CGP alone, and the serial baseline).

`frontier` is frontier-group dispatch (RolloutPipe, section 3.3): at most `frontier_groups` groups are in service, those of
lowest submission order. Engines run small batches, so that each token comes sooner and the groups of the next optimizer step
finish first. A group holds its place until its last trajectory is done: where rollout is the bottleneck, engines starve.

`soft_frontier` gives engines as much as they can run at once (every slot, within a budget of KV tokens) unless two things
hold: the trainer would idle soon, and smaller batches pay (`SoftFrontier.pays`). Then it is a frontier, as wide as brings the
first group soonest by what past rollouts say (policy/width.py; or as `frontier_groups` says) and WIDEN wider by every group
that waits for the trainer. Where rollout is the bottleneck this is fifo admission without the requests that would only wait in
an engine; where training is, the first step's groups come nearly as early as the paper's frontier brings them, or earlier. In
both the engines' queues are ordered by priority, minus the submission order: what is backfilled never starts before the
frontier.

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

from dataclasses import dataclass
from typing import Protocol

from rpipe.policy.width import Width


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
    groups_served: int = 0  # of this rollout: serving-complete
    rollout_group_s: float | None = None  # seconds from one serving-complete group to the next, as measured; None: not yet
    train_group_s: float | None = None  # seconds of training for one group, as measured
    widths: tuple[Width, ...] = ()  # what is expected of each, by past rollouts; ascending, empty: nothing yet


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
SURE = 0.6  # training that would end by so much later than rollout is what ends last; one that ends with it never does: it
# waits between groups
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
        width = self.width(load)
        groups = self.frontier_groups or (width.groups if width else self.groups_per_step)
        return load.groups_in_service < groups + WIDEN * load.groups_ready or not self.pays(load, width)

    def width(self, load: RolloutLoad) -> Width | None:
        """The quickest, no narrower than a step; or what is nearest to the one that was asked for. None: nothing is known."""
        least = self.frontier_groups or self.groups_per_step
        wide = [width for width in load.widths if width.groups >= least] or load.widths[-1:]
        return min(wide[:1] if self.frontier_groups else wide, key=lambda width: width.first_s, default=None)

    def pays(self, load: RolloutLoad, width: Width | None) -> bool:
        """Does a frontier bring the iteration's end nearer? Before the first group: training begins sooner by more than rollout
        ends later, each weighed by how likely it is what ends last. After it: rollout will be done before the last step's
        training could begin, however small its batches are now. Unknown rates: what there is to gain, the first step's groups
        sooner, is gained when the first of them is ready."""
        if load.rollout_group_s is None or load.train_group_s is None:
            return not load.groups_ready
        rollout_s = load.groups_unserved * load.rollout_group_s
        train_s = (load.groups_untrained - self.groups_per_step) * load.train_group_s
        if load.groups_served or not rollout_s or width is None:
            return train_s > (1 + MARGIN) * rollout_s
        first_s = load.widths[-1].first_s
        ends_last = min(max(((first_s + train_s) / rollout_s - 1) / SURE, 0.0), 1.0)
        # Full engines bring a group `first_s` after the frontier has opened: what it made must last the trainer so long.
        gained_s = min(first_s, width.groups * load.train_group_s) - width.first_s
        return ends_last * gained_s > (1 - ends_last) * width.lost_s

"""For what did the trainer wait in one iteration?

Between the rollout's request and the end of training a replica either works (micro-batches, optimizer steps) or waits. A
wait ends with a micro-batch: it was for that micro-batch's group which arrived last. That group was complete with one
trajectory: the way of that trajectory (deferred, queued, generating, scored, sent) is laid over the wait, so every second of it
has one reason. The seconds of all reasons add up to the wait: rollout_to_train_end_s - train_busy_s of docs/event-log.md.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from rpipe.analysis.spans import Detail, Group, MicroBatch, Trajectory

Phase = Literal[
    "deferred", "queued", "generating", "environment", "lost", "reward", "filter", "channel", "dispatch", "replicas"
]
PHASES: dict[Phase, str] = {
    "deferred": "the group was not admitted yet",
    "queued": "in the engine's queue or prefill",
    "generating": "the engine generated",
    "environment": "between two turns: a tool or an environment",
    "lost": "its engine was lost, or there was none: until it went on elsewhere",
    "reward": "the reward function, its queue included",
    "filter": "the filter function",
    "channel": "on the way to the trainer",
    "dispatch": "there, but not handed out: the mode's order, or the trainer's own work",
    "replicas": "another replica still worked on the step",
}
SHORT_S = 1e-9
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Wait:
    """Seconds for one reason. `group` and `trajectory`: what was waited for; None where it was none."""

    phase: Phase
    group: int | None
    trajectory: int | None  # sample within the group
    seconds: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """Of one iteration. `waits` is sorted, longest first; its seconds add up to `seconds`."""

    whole_s: float
    seconds: float
    waits: tuple[Wait, ...]
    serial: bool  # training began after the rollout had ended

    def of(self, *phases: Phase) -> float:
        return sum(wait.seconds for wait in self.waits if wait.phase in phases)


def waiting(at: Detail) -> Waiting | None:
    """None where nothing was trained."""
    begin, end = at.requested_t, at.train_ended_t
    batches = [b for b in at.micro_batches if b.started_t is not None and b.ended_t is not None]
    if begin is None or end is None or not batches or end <= begin:
        return None
    first = min(b.dispatched_t for b in batches)
    serial = at.rollout_ended_t is not None and first >= at.rollout_ended_t and len(at.groups) > 1
    last_sent = max((g for g in at.groups.values() if g.arrived_t is not None), key=_arrived, default=None)
    seconds: dict[tuple[Phase, int | None, int | None], float] = defaultdict(float)
    for replica in range(at.replicas):
        for (start, stop), batch in _gaps(at, batches, replica, begin, end):
            if batch is None:  # a step begins: replicas meet
                seconds["replicas", None, None] += stop - start
                continue
            awaited = last_sent if serial and batch.dispatched_t <= first else _awaited(at, batch)
            _lay(seconds, awaited, start, stop)
    share = 1 / at.replicas
    waits = [Wait(*reason, taken * share) for reason, taken in seconds.items() if taken > SHORT_S]
    waits.sort(key=lambda w: (-w.seconds, w.phase, w.group or 0, w.trajectory or 0))
    return Waiting(end - begin, sum(w.seconds for w in waits), tuple(waits), serial)


def _arrived(group: Group) -> float:
    return group.arrived_t if group.arrived_t is not None else float("-inf")


def _awaited(at: Detail, batch: MicroBatch) -> Group | None:
    groups = [at.groups[number] for number, _ in batch.slices if number in at.groups]
    return max(groups, key=_arrived, default=None)


def _gaps(
    at: Detail, batches: list[MicroBatch], replica: int, begin: float, end: float
) -> list[tuple[Interval, MicroBatch | None]]:
    """Where `replica` does not work, each with the micro-batch that ended the wait; None where a step did."""
    mine = [b for b in batches if b.replica == replica]
    busy: list[tuple[float, float, MicroBatch | None]] = [
        (b.started_t, b.ended_t, b) for b in mine if b.started_t is not None and b.ended_t is not None
    ]
    busy += [(s.started_t, s.ended_t, None) for s in at.steps.values() if s.started_t is not None and s.ended_t is not None]
    gaps: list[tuple[Interval, MicroBatch | None]] = []
    free = begin
    for start, stop, batch in sorted(busy, key=lambda span: span[:2]):
        if start - free > SHORT_S:
            gaps.append(((free, start), batch))
        free = max(free, stop)
    if end - free > SHORT_S:
        gaps.append(((free, end), None))
    return gaps


def _lay(seconds: dict[tuple[Phase, int | None, int | None], float], group: Group | None, start: float, stop: float) -> None:
    """Share [start, stop] out over the phases of the group's last trajectory."""
    last = group.last() if group is not None else None
    if group is None or last is None:
        seconds["dispatch", group.group if group else None, None] += stop - start
        return
    at = start
    for phase, until in _way(group, last):
        until = min(until, stop)
        if until > at:
            seconds[phase, group.group, last.sample] += until - at
            at = until
    if stop > at:
        seconds["dispatch", group.group, last.sample] += stop - at


def _way(group: Group, last: Trajectory) -> list[tuple[Phase, float]]:
    """Phases in order, each with the time at which it ended."""
    way: list[tuple[Phase, float]] = []
    for index, turn in enumerate(last.turns):
        way.append(("lost" if index else "deferred", turn.sent_t))
        if turn.first_token_t is not None:
            way.append(("queued", turn.first_token_t))
        if turn.ended_t is not None:
            way.append(("generating", turn.ended_t))
        if turn.tool is not None and turn.tool.ended_t is not None:
            way.append(("environment", turn.tool.ended_t))
    if last.scored_t is not None:
        way.append(("reward", last.scored_t))
    if group.filtered_t is not None:
        way.append(("filter", group.filtered_t))
    if group.arrived_t is not None:
        way.append(("channel", group.arrived_t))
    return way

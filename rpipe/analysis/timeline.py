"""Who did what, and when, in one iteration?

All times are seconds since the iteration's RolloutRequested.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rpipe.analysis.collect import Collector, stream
from rpipe.analysis.lanes import lanes
from rpipe.analysis.metrics import Attempt, Iteration
from rpipe.analysis.run import RunError, attempts, read
from rpipe.analysis.spans import Detail, Track, tool_calls


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that lasted. `lane`: a slot of an engine (of the tools) or a replica; `step` counts from 0 in the iteration."""

    lane: int
    start: float
    end: float
    step: int | None  # None: the group was dropped, or its step never came


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group's way; None: it did not come so far. `ends`: when each of its trajectories was generated, sorted."""

    group: int
    step: int | None
    dropped: bool
    ends: list[float]
    admitted: float | None
    generated: float | None
    complete: float | None
    arrived: float | None
    dispatched: float | None
    trained: float | None


@dataclass(slots=True)
class Timeline:
    iteration: int
    simulated: bool = False
    turns: dict[int, list[Bar]] = field(default_factory=dict)  # engine -> bars, lanes from 0
    tools: list[Bar] = field(default_factory=list)  # the environment's answers, lanes from 0; most runs ask for none
    completions: list[tuple[float, int | None]] = field(default_factory=list)  # trainable groups: when, and their step
    micro_batches: list[Bar] = field(default_factory=list)  # lane = replica
    steps: list[Bar] = field(default_factory=list)
    publishes: list[Bar] = field(default_factory=list)
    saves: list[Bar] = field(default_factory=list)
    groups: list[GroupRow] = field(default_factory=list)  # in submission order
    rollout_end: float | None = None
    first_dispatch: float | None = None
    train_end: float | None = None

    @property
    def slots(self) -> dict[int, int]:
        """Lanes of each engine."""
        return {engine: width(bars) for engine, bars in self.turns.items()}


def width(bars: list[Bar]) -> int:
    """Lanes that they lie in."""
    return 1 + max(bar.lane for bar in bars)


def timeline(run: Path, iteration: int | None) -> Timeline:
    """Of `iteration`, or of the last complete one. Raises RunError where there is none."""
    attempt, figures = _choose(run, iteration)
    collector = Collector()
    found = [d for d in stream(read(attempt), collector) if d.purpose == "train" and d.iteration == figures.iteration]
    return _of(found[-1], figures, collector.track)


def _choose(run: Path, wanted: int | None) -> tuple[Path, Iteration]:
    """The last attempt that completed the iteration, else the last that began it."""
    begun: tuple[Path, Iteration] | None = None
    known: set[int] = set()
    for directory in reversed(attempts(run)):
        iterations = Attempt.of(read(directory)).iterations
        known.update(iterations)
        complete = [number for number, at in iterations.items() if at.complete]
        number = max(complete, default=None) if wanted is None else wanted
        at = iterations.get(number) if number is not None else None
        if at is not None and at.complete:
            return directory, at
        if at is not None and at.requested_t is not None and begun is None:
            begun = directory, at
    if begun is not None:
        return begun
    if wanted is None:
        raise RunError(f"{run}: no iteration is complete yet")
    held = f"{min(known)} to {max(known)}" if known else "none"
    raise RunError(f"{run}: --iteration {wanted}: not in this run (it holds {held})")


def _of(at: Detail, figures: Iteration, track: Track) -> Timeline:
    zero = at.requested_t
    assert zero is not None

    def since(t: float | None) -> float | None:
        return None if t is None else t - zero

    index = at.step_index()
    step_of = {g.group: index.get(g.step) if g.step is not None else None for g in at.groups.values()}
    found = Timeline(at.iteration, turns=_turns(at, zero, step_of), tools=_tools(at, zero, step_of))
    for m in at.micro_batches:
        if m.started_t is not None and m.ended_t is not None:
            found.micro_batches.append(Bar(m.replica, m.started_t - zero, m.ended_t - zero, index.get(m.step)))
    for step in at.steps.values():
        if step.started_t is not None and step.ended_t is not None:
            found.steps.append(Bar(0, step.started_t - zero, step.ended_t - zero, index[step.step]))
    if at.publish is not None:
        found.publishes.append(Bar(0, at.publish.started_t - zero, at.publish.ended_t - zero, None))
    saved = [(start, end) for start, end, iteration in track.checkpoints if iteration == at.iteration + 1]
    found.saves = [Bar(0, start - zero, end - zero, None) for start, end in saved]
    for g in sorted(at.groups.values(), key=lambda g: g.order):
        if g.sent_t is not None and not g.dropped:
            found.completions.append((g.sent_t - zero, step_of[g.group]))
        ends = sorted(t.generated_t - zero for t in g.trajectories.values() if t.generated_t is not None)
        times = (g.admitted_t, g.generated_t, g.sent_t, g.arrived_t, g.dispatched_t, g.trained_t)
        found.groups.append(GroupRow(g.group, step_of[g.group], bool(g.dropped), ends, *map(since, times)))
    found.completions.sort(key=lambda one: one[0])
    found.rollout_end, found.train_end = since(at.rollout_ended_t), since(at.train_ended_t)
    found.first_dispatch = since(figures.first_dispatch_t)
    found.simulated = bool(track.simulated)
    return found


def _turns(at: Detail, zero: float, step_of: dict[int, int | None]) -> dict[int, list[Bar]]:
    """Turns that overlap lie in lanes of their own, the lowest free one first."""
    turns: dict[int, list[tuple[float, float, int]]] = {}
    for trajectory in at.trajectories():
        for turn in trajectory.turns:
            if turn.ended_t is not None:
                start = turn.started_t if turn.started_t is not None else turn.sent_t
                turns.setdefault(turn.engine, []).append((start - zero, turn.ended_t - zero, trajectory.group))
    laid: dict[int, list[Bar]] = {}
    for engine, mine in sorted(turns.items()):
        mine.sort()
        slots = lanes([(start, end) for start, end, _ in mine])
        laid[engine] = [Bar(slot, start, end, step_of.get(group)) for slot, (start, end, group) in zip(slots, mine)]
    return laid


def _tools(at: Detail, zero: float, step_of: dict[int, int | None]) -> list[Bar]:
    """From the question to the answer, a wait for a free process included; lanes as of turns."""
    calls = tool_calls(at)
    slots = lanes([(asked, answered) for asked, answered, _, _ in calls])
    return [
        Bar(slot, asked - zero, answered - zero, step_of.get(trajectory.group))
        for slot, (asked, answered, _, trajectory) in zip(slots, calls)
    ]

"""Who did what, and when, in one iteration?

All times are seconds since the iteration's RolloutRequested.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rpipe.analysis.metrics import Attempt, Iteration
from rpipe.analysis.run import Record, RunError, attempts, read


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that lasted. `lane` is a slot of an engine, or a replica; `step` counts from 0 within the iteration."""

    lane: int
    start: float
    end: float
    step: int | None  # None: the group was dropped, or its step never came


@dataclass(slots=True)
class Timeline:
    iteration: int
    turns: dict[int, list[Bar]] = field(default_factory=dict)  # engine -> bars, lanes from 0
    completions: list[tuple[float, int | None]] = field(default_factory=list)  # trainable groups: when, and their step
    micro_batches: list[Bar] = field(default_factory=list)  # lane = replica
    steps: list[Bar] = field(default_factory=list)
    publishes: list[Bar] = field(default_factory=list)
    saves: list[Bar] = field(default_factory=list)
    rollout_end: float | None = None
    first_dispatch: float | None = None
    train_end: float | None = None

    @property
    def slots(self) -> dict[int, int]:
        """Lanes of each engine."""
        return {engine: 1 + max(bar.lane for bar in bars) for engine, bars in self.turns.items()}


def timeline(run: Path, iteration: int | None) -> Timeline:
    """Of `iteration`, or of the last complete one. Raises RunError where there is none."""
    attempt, figures = _choose(run, iteration)
    return collect(read(attempt), figures)


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


def collect(records: Iterable[Record], at: Iteration) -> Timeline:
    """One pass over an attempt's records."""
    assert at.requested_t is not None
    zero, found = at.requested_t, Timeline(at.iteration)
    groups: set[int] = set()
    turns: list[tuple[float, float, int, int]] = []  # start, end, engine, group
    completed: list[tuple[float, int]] = []
    step_index: dict[int, int] = {}  # step -> its place in the iteration
    batch_step: dict[tuple[int, int], int] = {}
    group_step: dict[int, int] = {}
    for r in records:
        kind = r["kind"]
        if kind == "RolloutRequested" and r["purpose"] == "train" and r["iteration"] == at.iteration:
            groups = {spec["group"] for spec in r["groups"]}
        elif kind == "TurnFinished" and r["trajectory"][0] in groups:
            turns.append((r["started_t"] - zero, r["t"] - zero, r["engine"], r["trajectory"][0]))
        elif kind == "SendGroup" and r["iteration"] == at.iteration:
            completed.append((r["t"] - zero, r["group"]))
        elif kind == "BeginStep" and r["iteration"] == at.iteration:
            step_index[r["step"]] = len(step_index)
        elif kind == "TrainMicroBatch" and r["step"] in step_index:
            batch_step[r["replica"], r["micro_batch"]] = step_index[r["step"]]
            group_step.update({part["group"]: step_index[r["step"]] for part in r["slices"]})
        elif kind == "MicroBatchDone" and (r["replica"], r["micro_batch"]) in batch_step:
            step = batch_step.pop((r["replica"], r["micro_batch"]))
            found.micro_batches.append(Bar(r["replica"], r["started_t"] - zero, r["ended_t"] - zero, step))
        elif kind == "StepDone" and r["step"] in step_index:
            found.steps.append(Bar(0, r["started_t"] - zero, r["t"] - zero, step_index[r["step"]]))
        elif kind == "WeightsPublished" and r["version"] == at.iteration + 1:
            found.publishes.append(Bar(0, r["started_t"] - zero, r["t"] - zero, None))
        elif kind == "CheckpointSaved" and r["iteration"] == at.iteration + 1:
            found.saves.append(Bar(0, r["started_t"] - zero, r["t"] - zero, None))
    found.turns = _slots(turns, group_step)
    found.completions = [(t, group_step.get(group)) for t, group in completed]
    found.rollout_end = None if at.rollout_ended_t is None else at.rollout_ended_t - zero
    found.first_dispatch = None if at.first_dispatch_t is None else at.first_dispatch_t - zero
    found.train_end = None if at.train_ended_t is None else at.train_ended_t - zero
    return found


def _slots(turns: list[tuple[float, float, int, int]], group_step: dict[int, int]) -> dict[int, list[Bar]]:
    """Lay turns that overlap into lanes of their own, the lowest free one first."""
    laid: dict[int, list[Bar]] = {}
    busy: dict[int, list[tuple[float, int]]] = {}  # engine -> heap of (end, lane)
    free: dict[int, list[int]] = {}  # engine -> heap of lanes
    for start, end, engine, group in sorted(turns):
        running, idle = busy.setdefault(engine, []), free.setdefault(engine, [])
        while running and running[0][0] <= start:
            heapq.heappush(idle, heapq.heappop(running)[1])
        lane = heapq.heappop(idle) if idle else len(running)
        heapq.heappush(running, (end, lane))
        laid.setdefault(engine, []).append(Bar(lane, start, end, group_step.get(group)))
    return {engine: laid[engine] for engine in sorted(laid)}

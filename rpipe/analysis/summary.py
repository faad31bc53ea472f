"""What do all attempts of a run add up to?

An iteration that was interrupted and trained again counts once: the last attempt that completed it wins.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rpipe.analysis import history
from rpipe.analysis.collect import Collector
from rpipe.analysis.diagnosis import Diagnosis, diagnose
from rpipe.analysis.history import AttemptSpan, Work
from rpipe.analysis.metrics import Attempt, Iteration
from rpipe.analysis.problems import problems
from rpipe.analysis.run import Record, RunError, attempts, failure, launcher_said, read
from rpipe.analysis.spans import Detail
from rpipe.analysis.totals import Totals

Report = dict[str, Any]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """`iterations` and `evaluations` in order of iteration; `interrupted` were begun and never completed."""

    attempts: list[Attempt]
    iterations: list[Iteration]
    evaluations: list[dict[str, Any]]
    interrupted: list[int]
    diagnoses: dict[int, Diagnosis]  # iteration -> why its trainer waited
    spans: list[AttemptSpan]
    home: dict[int, int]  # complete iteration -> index of the attempt that it is taken from
    outages: list[str]  # a sentence each
    simulated: str  # on which hardware; empty for a real run
    calibrated: bool | None  # whether that was fitted to real runs of this model; None: a real run, or an older log
    other_events: dict[str, int]  # kinds that no figure comes from -> how many


@dataclass(slots=True)
class _Pass:
    """One attempt, read once: figures, diagnoses and work come from the same stream."""

    directory: Path
    collector: Collector = field(default_factory=Collector)
    diagnoses: dict[int, Diagnosis] = field(default_factory=dict)
    work: dict[int, Work] = field(default_factory=dict)
    see: Callable[[Detail], None] | None = None

    def read(self) -> Attempt:
        attempt = Attempt.of(self._records())
        for detail in self.collector.close():
            self._add(detail)
        attempt.end = failure(self.directory) or attempt.end
        if attempt.end is None:  # its ranks had no time to say why; the launcher may know
            attempt.end = launcher_said(self.directory).get("cause") or None
        return attempt

    def _records(self) -> Iterator[Record]:
        for record in read(self.directory):
            for detail in self.collector.take(record):
                self._add(detail)
            yield record

    def _add(self, detail: Detail) -> None:
        if detail.purpose != "train":
            return
        if self.see is not None:
            self.see(detail)
        self.work[detail.iteration] = Work.of(detail, self.collector.track.ended_t)
        told = diagnose(detail)
        if told is not None:
            self.diagnoses[detail.iteration] = told


def summarize(run: Path, see: Callable[[Detail], None] | None = None) -> RunSummary:
    """Read every attempt of `run`; `see` is shown each training iteration as it closes. Raises RunError: not a run dir, no
    events yet, a damaged line."""
    passes = [_Pass(directory, see=see) for directory in attempts(run)]
    told = [one.read() for one in passes]
    if not any(attempt.events for attempt in told):
        raise RunError(f"{run}: no events yet: the job is still starting, or it ended before it began to train")
    kept: dict[int, Iteration] = {}
    home: dict[int, int] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    begun: set[int] = set()
    other: dict[str, int] = {}
    for index, attempt in enumerate(told):
        begun.update(attempt.iterations)
        complete = {number: at for number, at in attempt.iterations.items() if at.complete}
        kept.update(complete)
        home.update(dict.fromkeys(complete, index))
        evaluations.update(attempt.evaluations)
        for kind, count in passes[index].collector.track.marked.items():
            other[kind] = other.get(kind, 0) + count
    tracks = [one.collector.track for one in passes]
    ends = [attempt.end for attempt in told]
    return RunSummary(
        attempts=told,
        iterations=[kept[number] for number in sorted(kept)],
        evaluations=[evaluations[number] for number in sorted(evaluations)],
        interrupted=sorted(begun - set(kept)),
        diagnoses={n: passes[home[n]].diagnoses[n] for n in sorted(kept) if n in passes[home[n]].diagnoses},
        spans=history.history([one.directory for one in passes], tracks, ends, [one.work for one in passes], home),
        home=home,
        outages=history.outages(tracks),
        simulated=next((track.simulated for track in tracks if track.simulated), ""),
        calibrated=next((track.calibrated for track in tracks if track.simulated), None),
        other_events=other,
    )


def report(run: Path, name: str) -> Report:
    """The whole report as JSON-ready values; "iterations", "evaluations" and "attempts" keep their names and meanings."""
    return report_of(summarize(run), name)


def report_of(found: RunSummary, name: str) -> Report:
    rows = [at.figures() for at in found.iterations]
    return {
        "iterations": rows,
        "evaluations": found.evaluations,
        "attempts": len(found.attempts),
        "run": _run(found, rows, name),
    }


def _run(found: RunSummary, rows: list[Report], name: str) -> Report:
    lengths = array("q")
    for at in found.iterations:
        lengths.extend(at.response_tokens)
    ordered = sorted(lengths)
    truncated = sum(at.truncated for at in found.iterations)
    rollout_s = sum(row["rollout_s"] for row in rows)
    totals = Totals()
    for told in found.diagnoses.values():
        totals.add(told)
    return {
        "name": name,
        "simulated": found.simulated,
        "calibrated": found.calibrated,
        "ended": found.attempts[-1].end,  # empty at a normal end, None while it runs or where it was killed
        "seconds": sum(attempt.seconds for attempt in found.attempts),
        "tokens_per_s": sum(row["generated_tokens"] for row in rows) / rollout_s if rollout_s else None,
        "skipped_steps": sum(at.skipped_steps for at in found.iterations),
        "incomplete_iterations": len(found.interrupted),
        "truncation_rate": truncated / len(lengths) if lengths else None,
        "response_tokens_p50": nearest_rank(ordered, 0.50),
        "response_tokens_p95": nearest_rank(ordered, 0.95),
        "tools": _tools(found.iterations),
        "publish_s": median([s for attempt in found.attempts for s in attempt.publish_s]),
        "checkpoint_s": median([s for attempt in found.attempts for s in attempt.checkpoint_s]),
        "time_s": _time(found, rows),
        "medians": _medians(rows),
        "waiting": totals.shares(),
        "diagnosis": [*totals.sentences(), *found.outages, *history.sentences(found.spans)],
        "history": [span.row() for span in found.spans],
        "other_events": found.other_events,
        "problems": problems(found.attempts, found.iterations, found.interrupted),
    }


def _tools(iterations: list[Iteration]) -> Report | None:
    """What the environment did; None where nobody asked it."""
    seconds = sorted(s for at in iterations for s in at.tool_s)
    trajectories = sum(at.trajectories for at in iterations)
    if not seconds:
        return None
    return {
        "calls": len(seconds),
        "failed": sum(at.tool_errors for at in iterations),
        "turns_mean": sum(at.turns for at in iterations) / trajectories if trajectories else None,
        "answer_tokens_mean": sum(at.answer_tokens for at in iterations) / len(seconds),
        "seconds": sum(seconds),
        "seconds_p50": nearest_rank(seconds, 0.50),
        "seconds_p95": nearest_rank(seconds, 0.95),
    }


def _medians(rows: list[Report]) -> Report:
    keys = [key for key in rows[0] if key != "iteration"] if rows else []
    return {key: median([row[key] for row in rows if row[key] is not None]) for key in keys}


def _time(found: RunSummary, rows: list[Report]) -> dict[str, float]:
    """Where the job's seconds went; the parts add up to `seconds`."""
    parts = {
        "starting": sum(max(0.0, a.start_s - a.warm_up_s) for a in found.attempts),
        "warming up": sum(a.warm_up_s for a in found.attempts),
        "evaluating": sum(a.evaluation_s for a in found.attempts),
        "rollout": sum(row["rollout_s"] for row in rows),
        "training after rollout": sum(max(0.0, (row["rollout_to_train_end_s"] or 0.0) - row["rollout_s"]) for row in rows),
        "publishing": sum(sum(a.publish_s) for a in found.attempts),
        "saving": sum(sum(a.checkpoint_s) for a in found.attempts),
    }
    total = sum(attempt.seconds for attempt in found.attempts)
    return {**parts, "other": max(0.0, total - sum(parts.values()))}


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def nearest_rank(ordered: list[Number], share: float) -> Number | None:
    """The smallest value that at least `share` of all are not above."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

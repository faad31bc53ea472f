"""What do all attempts of a run add up to?

An iteration that was interrupted and trained again counts once: the last attempt that completed it wins.
"""

from __future__ import annotations

import math
import statistics
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpipe.analysis.metrics import Attempt, Iteration
from rpipe.analysis.problems import problems
from rpipe.analysis.run import RunError, attempts, failure, read

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """`iterations` and `evaluations` in order of iteration; `interrupted` were begun and never completed."""

    attempts: list[Attempt]
    iterations: list[Iteration]
    evaluations: list[dict[str, Any]]
    interrupted: list[int]


def summarize(run: Path) -> RunSummary:
    """Read every attempt of `run`. Raises RunError: not a run dir, no events yet, a damaged line."""
    told: list[Attempt] = []
    for directory in attempts(run):
        attempt = Attempt.of(read(directory))
        attempt.end = failure(directory) or attempt.end
        told.append(attempt)
    if not any(attempt.events for attempt in told):
        raise RunError(f"{run}: no events yet: the job is still starting, or it ended before it began to train")
    kept: dict[int, Iteration] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    begun: set[int] = set()
    for attempt in told:
        begun.update(attempt.iterations)
        kept.update({number: at for number, at in attempt.iterations.items() if at.complete})
        evaluations.update(attempt.evaluations)
    return RunSummary(
        attempts=told,
        iterations=[kept[number] for number in sorted(kept)],
        evaluations=[evaluations[number] for number in sorted(evaluations)],
        interrupted=sorted(begun - set(kept)),
    )


def report(run: Path, name: str) -> Report:
    """The whole report as JSON-ready values; "iterations", "evaluations" and "attempts" keep their names and meanings."""
    found = summarize(run)
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
    return {
        "name": name,
        "ended": found.attempts[-1].end,  # empty at a normal end, None while it runs or where it was killed
        "seconds": sum(attempt.seconds for attempt in found.attempts),
        "tokens_per_s": sum(row["generated_tokens"] for row in rows) / rollout_s if rollout_s else None,
        "skipped_steps": sum(at.skipped_steps for at in found.iterations),
        "incomplete_iterations": len(found.interrupted),
        "truncation_rate": truncated / len(lengths) if lengths else None,
        "response_tokens_p50": nearest_rank(ordered, 0.50),
        "response_tokens_p95": nearest_rank(ordered, 0.95),
        "publish_s": median([s for attempt in found.attempts for s in attempt.publish_s]),
        "checkpoint_s": median([s for attempt in found.attempts for s in attempt.checkpoint_s]),
        "time_s": _time(found, rows),
        "medians": _medians(rows),
        "problems": problems(found.attempts, found.iterations, found.interrupted),
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


def nearest_rank(ordered: list[int], share: float) -> int | None:
    """The smallest value that at least `share` of all are not above."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

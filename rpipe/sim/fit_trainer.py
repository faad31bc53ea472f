"""Which costs explain what micro-batches took?

A micro-batch's time x speed = micro_batch_s + trajectory_s x trajectories + token_s x tokens, least squares, never
negative; several in one go through a pipeline as sim.costs.call_s has it. The speed is searched for: the same work is seen
with engines busy and idle.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rpipe.sim.observe import OUTLIER, FitError, Seen, Span, Timeline, joined

Array = NDArray[np.float64]
REFINED = 2  # times: which micro-batch of a call takes longest follows from its tokens first, then from what was found


@dataclass(frozen=True, slots=True)
class TrainerFit:
    micro_batch_s: float
    trajectory_s: float
    token_s: float
    step_s: float
    shared_speed: float  # while an engine is busy
    error: float  # root mean square of a micro-batch's seconds, over their root mean square


def fit_trainer(attempts: Sequence[Seen], sharing: bool) -> TrainerFit:
    """`sharing`: engines and trainer may slow one another. Raises FitError where there is too little to see."""
    rolling = [Timeline(joined([(t.started_t, t.end_t) for t in seen.turns])) for seen in attempts]
    spans = [((b.started_t, b.ended_t), busy) for seen, busy in zip(attempts, rolling) for b in seen.batches]
    steps = [(span, busy) for seen, busy in zip(attempts, rolling) for span in seen.steps]
    if len(spans) < 3 or not steps:
        raise FitError(f"{len(spans)} micro-batches and {len(steps)} optimizer steps; wanted: at least 3 and 1")
    taken_s = np.array([end - start for (start, end), _ in spans])

    def amounts(costs: Sequence[float]) -> Array:
        return np.array([_call(b.micro_batches, seen.stages, costs) for seen in attempts for b in seen.batches])

    def solve(speed: float, matrix: Array) -> tuple[Array, float]:
        """Costs, and the error in seconds as they were seen, not as they would have been alone."""
        slower = taken_s / np.array([work_s(span, busy, speed) for span, busy in spans])
        rows = matrix * slower[:, None]
        seen_s, weights = taken_s, 1 / np.sqrt(taken_s)
        found = nonnegative(rows * weights[:, None], seen_s * weights)
        missed = np.abs(rows @ found - seen_s)
        kept = missed <= OUTLIER * max(float(np.median(missed)), 1e-4)
        if kept.sum() >= 3:
            rows, seen_s, weights = rows[kept], seen_s[kept], weights[kept]
            found = nonnegative(rows * weights[:, None], seen_s * weights)
        left = (rows @ found - seen_s) * weights
        return found, float(np.sqrt(np.mean(left**2) / np.mean(taken_s)))

    shares = sharing and any(busy.at(span[0]) or busy.at(span[1]) for span, busy in spans)
    matrix = amounts((0.0, 0.0, 1.0))
    speed = min((0.3 + 0.02 * i for i in range(36)), key=lambda s: solve(s, matrix)[1]) if shares else 1.0
    found, error = solve(speed, matrix)
    for _ in range(REFINED if any(seen.stages > 1 for seen in attempts) else 0):
        found, error = solve(speed, amounts(found.tolist()))
    step_s = statistics.median(work_s(span, busy, speed) for span, busy in steps)
    return TrainerFit(float(found[0]), float(found[1]), float(found[2]), step_s, speed, error)


def _call(micro_batches: list[list[int]], stages: int, costs: Sequence[float]) -> list[float]:
    """What a call's time is linear in, as sim.costs.call_s: the longest micro-batch once more for every further stage."""
    each = [[1.0, float(len(lengths)), float(sum(lengths))] for lengths in micro_batches]
    longest = max(each, key=lambda amounts: sum(amount * cost for amount, cost in zip(amounts, costs)))
    return [(sum(amounts) + (stages - 1) * most) / stages for *amounts, most in zip(*each, longest)]


def work_s(span: Span, others: Timeline, shared_speed: float) -> float:
    """What it would have taken alone."""
    return sum((end - start) * (shared_speed if active else 1.0) for start, end, active in others.pieces(*span))


def nonnegative(matrix: Array, target: Array) -> Array:
    """Least squares without negative coefficients: the most negative is left out until none is."""
    kept = list(range(matrix.shape[1]))
    while kept:
        solution, *_ = np.linalg.lstsq(matrix[:, kept], target, rcond=None)
        if solution.min() >= 0:
            break
        del kept[int(solution.argmin())]
    out = np.zeros(matrix.shape[1])
    if kept:
        out[kept] = solution
    return out

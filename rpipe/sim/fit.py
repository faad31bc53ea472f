"""Which rates explain what real jobs took?

Engine. While n requests run, each gains tokens at rate(n), and nothing while a prefill is done. So a response of N tokens says

    N - 1 = sum over the time from its first to its last token of  speed x dt x rate(n)  -  stalls x rate(n)

with rate() linear between knots: least squares in its values, given the rest. `speed` is what cores shared with a busy trainer
leave; a stall is prefill_s + prefill_token_s x its tokens, both searched for, so that the residual is least. Runs with the
stages apart say it best: where there are some, the others are left out.

Trainer. A micro-batch's time x speed = micro_batch_s + trajectory_s x trajectories + token_s x tokens, least squares, never
negative; several in one go through a pipeline as sim.costs.call_s has it. The speed is searched for: the same work is seen
with engines busy and idle. Engines' own speed follows from responses beside a trainer, at the rates found without one. What
both leave of the cores is who hands tokens on from engine to owner (`engine_token_s`).

Everything else is a median of what was seen. Responses and micro-batches that a first fit misses by far are left out of a
second: another process had the core.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpipe.sim.costs import FURTHER_ENGINE
from rpipe.sim.observe import Seen, SeenTurn, Span, Timeline, joined

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LEAST_TURNS = 30
OUTLIER = 4.0
PARTS = ("idle_s", "busy_s", "stalls", "stall_tokens")
APART = 0.05  # stages count as apart up to this share of the time
TOGETHER_S = 0.006  # first tokens of one prefill reach the log at most so far apart
SMOOTH = 0.02  # weight of a rate's bend against a token of error
PREFILLS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
TOKENS = (0.0, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3)
Array = NDArray[np.float64]


class FitError(ValueError):
    """One line for the person who named the runs."""


@dataclass(frozen=True, slots=True)
class EngineFit:
    knots: tuple[int, ...]
    step_s: tuple[float, ...]
    prefill_s: float
    prefill_token_s: float
    shared_speed: float  # while a trainer computes
    error: float  # root mean square of tokens, over the root mean square of tokens


def fit_engine(attempts: Sequence[Seen], speed: float, kept: NDArray[np.bool_] | None = None) -> EngineFit:
    """`speed`: while a trainer computes. `kept`: which responses count, from a first fit to all.

    Raises FitError where there is too little to see."""
    every = [_turns(seen) for seen in attempts]
    apart = [found for found in every if _busy_s(found) <= APART * sum(sum(t.idle_s.values()) for t in found)]
    stretches = [t for found in (apart if sum(map(len, apart)) >= LEAST_TURNS else every) for t in found]
    beside = [t for found in every if found not in apart for t in found]
    once = kept is not None
    rows = _Rows(stretches if kept is None else [s for s, keep in zip(stretches, kept) if keep])
    if rows.count < LEAST_TURNS:
        raise FitError(f"{rows.count} responses of several tokens; wanted: at least {LEAST_TURNS}")
    prefill_s, token_s = min(product(PREFILLS, TOKENS), key=lambda at: rows.solve(at[0], at[1], speed)[1])
    widths = [0.02, 3e-4]
    for _ in range(12):  # down from the grid's best, one at a time, in ever smaller steps
        low, high = max(prefill_s - widths[0], 0.0), prefill_s + widths[0]
        prefill_s = least(lambda x: rows.solve(x, token_s, speed)[1], low, high)  # noqa: B023
        low, high = max(token_s - widths[1], 0.0), token_s + widths[1]
        token_s = least(lambda x: rows.solve(prefill_s, x, speed)[1], low, high)  # noqa: B023
        widths = [0.7 * w for w in widths]
    rates, error_tokens = rows.solve(prefill_s, token_s, speed)
    kept = rows.plausible(rates, prefill_s, token_s, speed)
    if not once and kept.sum() >= LEAST_TURNS and not kept.all():  # what another process disturbed says nothing of the engine
        return fit_engine(attempts, speed, kept)
    steps: Array = np.maximum.accumulate(1 / np.maximum(rates, 1e-6))  # a larger batch never takes a shorter step
    return EngineFit(
        knots=rows.knots,
        step_s=tuple(float(s) for s in steps),
        prefill_s=prefill_s,
        prefill_token_s=token_s,
        shared_speed=_shared_speed(beside, rows, (rates, prefill_s, token_s), speed),
        error=error_tokens / rows.scale,
    )


def _shared_speed(beside: list[_Stretch], rows: _Rows, fitted: tuple[Array, float, float], otherwise: float) -> float:
    """Of engines beside a trainer, by rates that were seen apart from it; `otherwise` where nothing was."""
    if len(beside) < LEAST_TURNS:
        return otherwise
    rates, prefill_s, token_s = fitted
    idle_s, busy_s, stalls, tokens = (rows.spread([getattr(t, name) for t in beside]) for name in PARTS)
    made = np.array([t.tokens - 1 for t in beside]) - (idle_s - prefill_s * stalls - token_s * tokens) @ rates
    alone = busy_s @ rates
    return min(max(float(made @ alone) / max(float(alone @ alone), 1e-9), 0.3), 1.0)


def least(error: Callable[[float], float], low: float, high: float, rounds: int = 14) -> float:
    """Golden section: where `error` is least."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    ea, eb = error(a), error(b)
    for _ in range(rounds):
        if ea < eb:
            high, b, eb = b, a, ea
            a = high - ratio * (high - low)
            ea = error(a)
        else:
            low, a, ea = a, b, eb
            b = low + ratio * (high - low)
            eb = error(b)
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class _Stretch:
    """One response's decoding, by how many ran beside it: seconds with the trainer idle and busy, stalls and their tokens."""

    tokens: int
    idle_s: dict[int, float]
    busy_s: dict[int, float]
    stalls: dict[int, float]
    stall_tokens: dict[int, float]


def _turns(seen: Seen) -> list[_Stretch]:
    training = Timeline(joined(trained(seen)))
    found: list[_Stretch] = []
    for engine in sorted({t.engine for t in seen.turns}):
        turns = [t for t in seen.turns if t.engine == engine]
        running = Timeline([(t.first_t, t.end_t) for t in turns])
        prefills = _prefills(turns)
        found += [_stretch(t, running, training, prefills) for t in turns if t.output_tokens > 1 and t.end_t > t.first_t]
    return found


def _busy_s(stretches: list[_Stretch]) -> float:
    return sum(sum(t.busy_s.values()) for t in stretches)


def trained(seen: Seen) -> list[Span]:
    return [*((b.started_t, b.ended_t) for b in seen.batches), *seen.steps]


def _prefills(turns: list[SeenTurn]) -> list[tuple[float, float]]:
    """(time of the last first token, fresh tokens) of every prefill batch: first tokens that came one soon after another."""
    batches: list[tuple[float, float]] = []
    for turn in sorted(turns, key=lambda t: t.first_t):
        if batches and turn.first_t - batches[-1][0] < TOGETHER_S:
            batches[-1] = (turn.first_t, batches[-1][1] + turn.fresh_tokens)
        else:
            batches.append((turn.first_t, float(turn.fresh_tokens)))
    return batches


def _stretch(turn: SeenTurn, running: Timeline, training: Timeline, prefills: list[tuple[float, float]]) -> _Stretch:
    idle: dict[int, float] = {}
    busy: dict[int, float] = {}
    for start, end, count in running.pieces(turn.first_t, turn.end_t):
        for a, b, active in training.pieces(start, end):
            into = busy if active else idle
            into[count] = into.get(count, 0.0) + b - a
    stalls: dict[int, float] = {}
    tokens: dict[int, float] = {}
    for t, fresh in prefills[bisect_left(prefills, (turn.first_t + TOGETHER_S, 0.0)) :]:
        if t >= turn.end_t:
            break
        count = running.at(t - 1e-9) or 1
        stalls[count] = stalls.get(count, 0.0) + 1
        tokens[count] = tokens.get(count, 0.0) + fresh
    return _Stretch(turn.output_tokens, idle, busy, stalls, tokens)


class _Rows:
    """The equations, one a response; columns are the knots of rate()."""

    def __init__(self, stretches: list[_Stretch]) -> None:
        self.count = len(stretches)
        most = max((n for s in stretches for n in (*s.idle_s, *s.busy_s)), default=1)
        self.knots = tuple(k for k in KNOTS if k <= most) or (1,)
        if self.knots[-1] < most:
            self.knots = (*self.knots, most)
        self.tokens: Array = np.array([s.tokens - 1 for s in stretches], np.float64)
        self.scale = float(np.sqrt(np.mean(self.tokens**2))) if self.count else 1.0
        parts = [self.spread([getattr(s, name) for s in stretches]) for name in PARTS]
        self._parts = parts
        # Normal equations of every pair of parts, so that a guess costs no pass over the rows.
        self._pairs = np.array([[a.T @ b for b in parts] for a in parts])
        self._products = np.array([a.T @ self.tokens for a in parts])
        bends = self._second_differences()
        self._smooth: Array = SMOOTH**2 * self.count * bends.T @ bends

    def spread(self, rows: list[dict[int, float]]) -> Array:
        """Each amount shared between the two knots around its count."""
        out = np.zeros((len(rows), len(self.knots)))
        for row, amounts in enumerate(rows):
            for count, amount in amounts.items():
                at = min(max(bisect_left(self.knots, count), 1), len(self.knots) - 1) if len(self.knots) > 1 else 0
                if at == 0:
                    out[row, 0] += amount
                    continue
                low, high = self.knots[at - 1], self.knots[at]
                part = min(max((count - low) / (high - low), 0.0), 1.0)
                out[row, at - 1] += amount * (1 - part)
                out[row, at] += amount * part
        return out

    def _second_differences(self) -> Array:
        size = len(self.knots)
        bends = np.zeros((max(size - 2, 0), size))
        for i in range(size - 2):
            bends[i, i : i + 3] = (1, -2, 1)
        return bends

    def plausible(self, rates: Array, prefill_s: float, prefill_token_s: float, shared_speed: float) -> NDArray[np.bool_]:
        """Whose tokens are missed by less than OUTLIER times what is usual."""
        weights = (1.0, shared_speed, -prefill_s, -prefill_token_s)
        missed = np.abs(sum(w * part for w, part in zip(weights, self._parts)) @ rates - self.tokens)
        usual = max(float(np.median(missed)), 0.5)  # a token is whole
        return missed <= OUTLIER * usual

    def solve(self, prefill_s: float, prefill_token_s: float, shared_speed: float) -> tuple[Array, float]:
        """Rates at the knots, and the root mean square error in tokens."""
        weights = np.array([1.0, shared_speed, -prefill_s, -prefill_token_s])
        square = np.einsum("a,b,abij->ij", weights, weights, self._pairs)
        aimed = weights @ self._products
        rates = np.linalg.lstsq(square + self._smooth, aimed, rcond=None)[0]
        squared = float(rates @ square @ rates - 2 * rates @ aimed + self.tokens @ self.tokens)
        impossible = 1e3 * float(np.sum(np.minimum(rates, 0.0) ** 2))  # nothing loses tokens
        return rates, math.sqrt(max(squared, 0.0) / max(self.count, 1)) + impossible


# ---- trainer --------------------------------------------------------------------------------------------------------


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
    matrix = np.array([_call(b.micro_batches, seen.stages) for seen in attempts for b in seen.batches])
    taken_s = np.array([end - start for (start, end), _ in spans])

    def solve(speed: float) -> tuple[Array, float]:
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
    speed = min((0.3 + 0.02 * i for i in range(36)), key=lambda s: solve(s)[1]) if shares else 1.0
    found, error = solve(speed)
    step_s = statistics.median(work_s(span, busy, speed) for span, busy in steps)
    return TrainerFit(float(found[0]), float(found[1]), float(found[2]), step_s, speed, error)


def _call(micro_batches: list[list[int]], stages: int) -> list[float]:
    """What a call's time is linear in, as sim.costs.call_s: the longest micro-batch once more for every further stage."""
    each = [[1.0, float(len(lengths)), float(sum(lengths))] for lengths in micro_batches]
    longest = max(each, key=lambda amounts: amounts[2])
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


# ---- the profile ----------------------------------------------------------------------------------------------------


def profile(
    attempts: Sequence[Seen], name: str, source: str, cores: float | None, parameters: int | None
) -> tuple[dict[str, Any], dict[str, float]]:
    """`hardware` as a config has it, and how well it fits. `cores`: what engines and trainer share, or None; `parameters`: of
    the model, where something says it.

    Raises FitError."""
    trainer = fit_trainer(attempts, cores is not None)
    engine = fit_engine(attempts, trainer.shared_speed)
    idle_groups = [_arrival_s(seen) for seen in attempts]
    message_s = _median([s for seen in attempts for s in seen.confirm_s])
    base_s, each_s = burst_line([pair for seen in attempts for pair in bursts(seen)])
    request_s = max(base_s - message_s - engine.prefill_s - engine.step_s[-1] / 2, 0.0)
    tree: dict[str, Any] = {
        "name": name,
        "source": source,
        "calibrated": not any(seen.simulated for seen in attempts),
        **({} if parameters is None else {"fitted_parameters": parameters}),
        "engine": {
            "decode_step_s": [[n, _short(s)] for n, s in zip(engine.knots, engine.step_s)],
            "prefill_s": _short(engine.prefill_s),
            "prefill_token_s": _short(engine.prefill_token_s),
        },
        "trainer": {
            "micro_batch_s": _short(trainer.micro_batch_s),
            "trajectory_s": _short(trainer.trajectory_s),
            "token_s": _short(trainer.token_s),
            "step_s": _short(trainer.step_s),
        },
        "message_s": _short(message_s),
        "request_s": _short(request_s),
        "request_each_s": _short(each_s),
        "reward_s": _short(_median([s for seen in attempts for s in seen.reward_s])),
        "group_s": _short(max(statistics.mean([s for waits in idle_groups for s in waits] or [0.0]) - message_s, 0.0)),
        **publish_line([pair for seen in attempts for pair in seen.publishes], message_s),
        "draw_s": _short(_median([s for seen in attempts for s in seen.draw_s])),
        "checkpoint_s": _short(_median([s for seen in attempts for s in seen.checkpoint_s])),
    }
    if cores is not None:
        # A training rank is a thread, an engine's scheduler too; what hands tokens on is more: engines have what it leaves.
        tokens_per_s, engines = shared_rate(attempts, engine)
        left = max((cores - trainer.shared_speed) / engine.shared_speed, engines)
        tree["host"] = {
            "cores": cores,
            "engine_cores": 1.0,
            "engine_token_s": _short((left - engines) / tokens_per_s) if tokens_per_s and trainer.shared_speed < 1.0 else 0.0,
            "engine_weight": _short(engine.shared_speed / trainer.shared_speed),
            "trainer_cores": 1.0,
        }
    speeds = {"shared speed": trainer.shared_speed, "engine speed": engine.shared_speed}
    return tree, {"engine": engine.error, "trainer": trainer.error, **speeds}


def shared_rate(attempts: Sequence[Seen], fit: EngineFit) -> tuple[float, float]:
    """While a trainer computes beside engines: tokens a second that they would make alone, and how many are busy."""
    tokens = busy_s = engine_s = 0.0
    for seen in attempts:
        training = Timeline(joined(trained(seen)))
        lines = [[(t.first_t, t.end_t) for t in seen.turns if t.engine == e] for e in sorted({t.engine for t in seen.turns})]
        for spans in lines:
            running = Timeline(spans)
            for start, end in joined(spans):
                for a, b, count in running.pieces(start, end):
                    shared_s = sum(d - c for c, d, active in training.pieces(a, b) if active)
                    tokens += shared_s * count / float(np.interp(count, fit.knots, fit.step_s))
                    engine_s += shared_s
        whole = joined([span for spans in lines for span in spans])
        busy_s += sum(d - c for start, end in whole for c, d, active in training.pieces(start, end) if active)
    return (tokens / busy_s, engine_s / busy_s) if busy_s else (0.0, 0.0)


BURST_S = 0.005  # requests sent at one moment are logged at most so far apart


def bursts(seen: Seen) -> list[tuple[int, float]]:
    """(requests sent to an engine at one moment, from the sending to the first of their first tokens), where places were free:
    fewer ran than the most that ever did."""
    found: list[tuple[int, float]] = []
    for index in sorted({t.engine for t in seen.turns}):
        turns = sorted((t for t in seen.turns if t.engine == index), key=lambda t: t.started_t)
        running = Timeline([(t.first_t, t.end_t) for t in turns])
        places = max(running.counts, default=0)
        burst: list[SeenTurn] = []
        for turn, following in zip(turns, [*turns[1:], None]):
            burst.append(turn)
            if following is None or following.started_t - turn.started_t > BURST_S:
                if running.at(burst[0].started_t) < places:
                    found.append((len(burst), min(t.first_t for t in burst) - burst[0].started_t))
                burst = []
    return found


def burst_line(pairs: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of any burst, and more a request in it; never negative. Medians by size, weighted by how many there were."""
    if not pairs:
        return 0.0, 0.0
    sizes = sorted({n for n, _ in pairs})
    medians = np.array([statistics.median(s for n, s in pairs if n == size) for size in sizes])
    weights = np.sqrt([float(sum(n == size for n, _ in pairs)) for size in sizes])
    matrix = np.stack([np.ones(len(sizes)), np.array(sizes, np.float64)], axis=1)
    if len(sizes) == 1:  # one size cannot tell the two apart
        return 0.0, float(medians[0]) / sizes[0]
    base, each = nonnegative(matrix * weights[:, None], medians * weights)
    return float(base), float(each)


def publish_line(pairs: Sequence[tuple[int, float]], message_s: float) -> dict[str, float]:
    """`publish_s`, of one engine, and `publish_engine_s` where different numbers of engines were seen."""
    pairs = [(engines, max(taken_s - message_s, 0.0)) for engines, taken_s in pairs]
    numbers = {engines for engines, _ in pairs}
    if len(numbers) > 1:
        base_s, each_s = burst_line(pairs)
        return {"publish_s": _short(base_s + each_s), "publish_engine_s": _short(each_s)}
    further = max(numbers, default=1) - 1
    return {"publish_s": _short(_median([taken_s for _, taken_s in pairs]) / (1 + further * FURTHER_ENGINE))}


def _arrival_s(seen: Seen) -> list[float]:
    """Of groups that found the trainer listening."""
    training = Timeline(joined(trained(seen)))
    free = [end - start for start, end in seen.groups if not training.at(start) and not training.at(end)]
    return free or [end - start for start, end in seen.groups]


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _short(value: float) -> float:
    return float(f"{value:.4g}")

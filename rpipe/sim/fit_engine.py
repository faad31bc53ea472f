"""Which decoding rates explain what responses took?

While n requests run, each gains tokens at rate(n), and nothing while a prefill is done. So a response of N tokens says

    N - 1 = sum over the time from its first to its last token of  speed x dt x rate(n)  -  stalls x rate(n)

with rate() linear between knots: least squares in its values, given the rest. `speed` is what cores shared with a busy trainer
leave; a stall is prefill_s + prefill_token_s x its tokens, both searched for, so that the residual is least. Where prompts are
about equally long the two cannot be told apart, and prefill_s is the whole of it. Runs with the stages apart say it best:
where there are some, the others are left out. Engines' own speed follows from responses beside a trainer, at the rates
found without one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from rpipe.sim.observe import OUTLIER, FitError, Seen, SeenTurn, Timeline, joined, trained

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LEAST_TURNS = 30
PARTS = ("idle_s", "busy_s", "stalls", "stall_tokens")
APART = 0.05  # stages count as apart up to this share of the time
TOGETHER_S = 0.006  # first tokens of one prefill reach the log at most so far apart
SMOOTH = 0.02  # weight of a rate's bend against a token of error
PREFILLS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
TOKENS = (0.0, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3)
VARIED = 2.0  # times the 10th percentile of prompts' lengths is the 90th, where they tell what a token of them costs
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EngineFit:
    knots: tuple[int, ...]
    step_s: tuple[float, ...]
    prefill_s: float
    prefill_token_s: float  # 0, and not fitted, where `prompt_tokens` hardly vary
    prompt_tokens: tuple[float, float]  # 10th and 90th percentile
    shared_speed: float  # while a trainer computes
    error: float  # root mean square of tokens, over the root mean square of tokens

    @property
    def tells_prefill_tokens(self) -> bool:
        return _varied(self.prompt_tokens)


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
    prompts = [n for seen in attempts for n in seen.prompt_tokens]
    prompt_tokens = float(np.percentile(prompts, 10)), float(np.percentile(prompts, 90))
    varied = _varied(prompt_tokens)
    prefill_s, token_s = min(product(PREFILLS, TOKENS if varied else (0.0,)), key=lambda at: rows.solve(at[0], at[1], speed)[1])
    widths = [0.02, 3e-4]
    for _ in range(12):  # down from the grid's best, one at a time, in ever smaller steps
        low, high = max(prefill_s - widths[0], 0.0), prefill_s + widths[0]
        prefill_s = least(lambda x: rows.solve(x, token_s, speed)[1], low, high)  # noqa: B023
        if varied:
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
        prompt_tokens=prompt_tokens,
        shared_speed=_shared_speed(beside, rows, (rates, prefill_s, token_s), speed),
        error=error_tokens / rows.scale,
    )


def _varied(prompt_tokens: tuple[float, float]) -> bool:
    return prompt_tokens[1] >= VARIED * prompt_tokens[0]


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

"""Which plan gives the shortest iteration? Bounds first, then small simulations, then whole ones of fewer and fewer plans.

    bounds      every plan that could run; best first. One that cannot come near the best estimate so far is not looked at again
    rollouts    engines and F_w alone, one iteration, of a large one a part; a queue then estimates every trainer
    whole       the best estimates, one iteration of both sides
    final       the best of those, all iterations; then neighbours of the very best, until none of them is new

Nothing depends on a clock: the same config gives the same plans. Raises config.ConfigError, one line, where there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rpipe.config import Config
from rpipe.sim.judge import Figures, Judge
from rpipe.sim.layouts import Engines, Plan, Trainer, plan_of
from rpipe.sim.plan_space import Space
from rpipe.sim.run import simulate

MARGIN = 1.05  # a bound that is so much worse than the best estimate ends the search there
COARSE = 4  # every so manieth F_w is tried first
REFINED = 12  # engines whose other F_w are tried
WHOLE = 24  # plans that are simulated whole
FINAL = 10  # plans of those that are simulated for all iterations
CLIMBED = 3  # best plans whose neighbours are tried
SAME_SPLIT = 4  # plans of one split and tp among those that are simulated whole


@dataclass(frozen=True, slots=True)
class Found:
    """`best` first; `bound_s`: no plan that could run is shorter in the first iteration. `pruned`: why, how many."""

    best: list[tuple[Plan, Figures]]
    own: tuple[Plan, Figures] | None  # the config's own choices, where they are of so many accelerators and could run
    cut: float  # share of the tokens that rollout.trajectory_deadline_s would cut from the best plan; it planned without
    bound_s: float
    space: Space
    pruned: Counter[str]
    rollouts: int  # simulated
    wholes: int  # simulated, all iterations counted
    iterations: int


Watch = Callable[[Judge], None]


def plan(config: Config, accelerators: int, iterations: int = 3, watch: Watch | None = None) -> Found:
    """`watch` is called after every simulation that may take a while."""
    judge = Judge(config, accelerators, iterations)
    watch = watch or (lambda judge: None)
    fates: dict[Plan, str] = {}
    estimates = _estimates(judge, fates, watch)
    chosen = _spread(sorted(estimates, key=lambda p: (estimates[p], p)))
    fates.update(dict.fromkeys(estimates.keys() - set(chosen), "search: behind in the simulated rollouts"))
    for candidate in chosen:
        judge.whole(candidate, 1)
        watch(judge)
    chosen.sort(key=lambda p: (judge.whole(p, 1).iteration_s, p))
    fates.update(dict.fromkeys(chosen[FINAL:], "search: behind in one simulated iteration"))
    final = _climb(judge, chosen[:FINAL], watch)
    for candidate, _ in final:
        fates.pop(candidate, None)
    return Found(
        best=final,
        own=_own(judge, config),
        cut=_cut(judge, config, final[0][0]),
        bound_s=min(judge.bounds.iteration_s(p) for p in judge.space.plans()),
        space=judge.space,
        pruned=judge.space.pruned + Counter(fates.values()),
        rollouts=judge.rollouts,
        wholes=judge.wholes,
        iterations=judge.iterations,
    )


def exhaustive(config: Config, accelerators: int, iterations: int = 3) -> tuple[Judge, list[tuple[Plan, Figures]]]:
    """Every plan that could run, simulated for all iterations; the best first."""
    judge = Judge(config, accelerators, iterations)
    return judge, _ranked(judge, judge.space.plans())


def _own(judge: Judge, config: Config) -> tuple[Plan, Figures] | None:
    own = plan_of(config)
    if own.engines.ranks + own.trainer.ranks != judge.space.accelerators or judge.space.refusal(own):
        return None
    return own, judge.whole(own, judge.iterations)


def _cut(judge: Judge, config: Config, best: Plan) -> float:
    chosen = judge.space.of(best)
    rollout = chosen.rollout.model_copy(update={"trajectory_deadline_s": config.rollout.trajectory_deadline_s})
    run = chosen.run.model_copy(update={"iterations": 1})
    rows = simulate(chosen.model_copy(update={"rollout": rollout, "run": run}), source=judge.source).iterations
    return max(0.0, 1 - float(rows[0]["generated_tokens"]) / judge.whole(best, 1).generated_tokens)


def _ranked(judge: Judge, plans: Iterable[Plan]) -> list[tuple[Plan, Figures]]:
    figures = {p: judge.whole(p, judge.iterations) for p in plans}
    return sorted(figures.items(), key=lambda item: (item[1].iteration_s, item[0]))


# ---- from all plans to a few ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Split:
    """Engines at one F_w, and the trainers that they could have."""

    engines: Engines
    width: int | None
    plans: list[Plan]
    bound_s: float


def _estimates(judge: Judge, fates: dict[Plan, str], watch: Watch) -> dict[Plan, float]:
    """Of every plan whose bound is not too bad. Coarse F_w for all engines, then all F_w of the best engines."""
    space, bounds = judge.space, judge.bounds
    trainers: dict[Engines, list[Trainer]] = {}
    for engines, trainer in space.pairs():
        trainers.setdefault(engines, []).append(trainer)
    splits = []
    for engines, found in trainers.items():
        for width in space.widths:
            plans = [Plan(engines, trainer, width) for trainer in found]
            splits.append(_Split(engines, width, plans, min(bounds.iteration_s(p) for p in plans)))
    splits.sort(key=lambda s: (s.bound_s, s.plans[0]))
    coarse = set(space.widths[-1::-COARSE])
    estimates: dict[Plan, float] = {}
    best_s = _walk(judge, [s for s in splits if s.width in coarse], estimates, float("inf"), fates, watch)
    by_engines: dict[Engines, float] = {}
    for candidate, seconds in estimates.items():
        by_engines[candidate.engines] = min(seconds, by_engines.get(candidate.engines, seconds))
    refined = set(sorted(by_engines, key=lambda engines: (by_engines[engines], engines))[:REFINED])
    rest = [s for s in splits if s.width not in coarse]
    _walk(judge, [s for s in rest if s.engines in refined], estimates, best_s, fates, watch)
    for split in rest:
        if split.engines not in refined:
            fates.update(dict.fromkeys(split.plans, "search: other F_w of engines that were behind"))
    return estimates


def _walk(
    judge: Judge, splits: list[_Split], estimates: dict[Plan, float], best_s: float, fates: dict[Plan, str], watch: Watch
) -> float:
    """Best bound first, until the bounds are behind what was found. Returns the best estimate."""
    for split in splits:
        near = [p for p in split.plans if judge.bounds.iteration_s(p) <= MARGIN * best_s]
        fates.update(dict.fromkeys(set(split.plans).difference(near), "search: cannot beat the best by its bound"))
        for candidate in near:
            estimates[candidate] = judge.estimate_s(candidate)
            best_s = min(best_s, estimates[candidate])
        if near:
            watch(judge)
    return best_s


def _spread(plans: list[Plan]) -> list[Plan]:
    """The first WHOLE, of which no split and tp has more than SAME_SPLIT."""
    chosen: list[Plan] = []
    per_engines: Counter[Engines] = Counter()
    for candidate in plans:
        if len(chosen) < WHOLE and per_engines[candidate.engines] < SAME_SPLIT:
            per_engines[candidate.engines] += 1
            chosen.append(candidate)
    return chosen


def _climb(judge: Judge, plans: list[Plan], watch: Watch) -> list[tuple[Plan, Figures]]:
    """The plans simulated for all iterations, and the neighbours of the best of them, until nothing near the best is new."""
    known, tried = set(plans), set(plans)
    while True:
        for candidate in plans:
            judge.whole(candidate, judge.iterations)
            watch(judge)
        ranked = _ranked(judge, known)
        first_s = max(judge.whole(best, 1).iteration_s for best, _ in ranked[:CLIMBED])
        near = {p for best, _ in ranked[:CLIMBED] for p in _neighbours(judge.space, best)} - tried
        tried |= near
        plans = sorted(p for p in near if judge.bounds.iteration_s(p) < first_s and judge.whole(p, 1).iteration_s < first_s)
        if not plans:
            return ranked
        known.update(plans)


def _neighbours(space: Space, best: Plan) -> list[Plan]:
    """The next narrower and wider F_w; the next splits to both sides, with the same tp and the nearest trainer."""
    at = space.widths.index(best.frontier_groups)
    found = [Plan(best.engines, best.trainer, width) for width in space.widths[max(at - 1, 0) : at + 2]]
    pairs = [(engines, trainer) for engines, trainer in space.pairs() if engines.tp == best.engines.tp]
    t = best.trainer
    for direction in (-1, 1):
        beside = [(a, b) for a, b in pairs if (a.ranks - best.engines.ranks) * direction > 0]
        if beside:
            nearest = min(abs(a.ranks - best.engines.ranks) for a, _ in beside)
            at_it = [(a, b) for a, b in beside if abs(a.ranks - best.engines.ranks) == nearest]
            engines, trainer = min(
                at_it, key=lambda pair: (abs(pair[1].lockstep - t.lockstep), pair[1].recompute != t.recompute, pair)
            )
            found.append(Plan(engines, trainer, best.frontier_groups))
    return [p for p in found if p != best]

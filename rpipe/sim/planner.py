"""Which plan gives the shortest iteration? Bounds first, then small simulations, then whole ones of fewer and fewer plans.

    bounds      every plan that could run; best first. One that cannot come near the best estimate so far is not looked at again
    rollouts    engines and F_w alone, one iteration, a part of it where it can be cut; a queue then estimates every trainer
    whole       the best estimates, one iteration of both sides
    final       the best of those, all iterations; then neighbours of the very best, until none of them is new

Nothing depends on a clock: the same config gives the same plans. Raises config.ConfigError, one line, where there is none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from rpipe.config import Config, ConfigError
from rpipe.config_simulation import MeasuredTrainer
from rpipe.core import events as e
from rpipe.sim.bounds import Bounds, Work, estimated_s, work_of
from rpipe.sim.costs import hardware_of, publish_s, trainer_costs
from rpipe.sim.job import SimulatedJob
from rpipe.sim.layouts import Engines, Plan, Space, Trainer, plan_of, space_of
from rpipe.sim.run import simulate
from rpipe.sim.workload import GroupWork, Source, source_of

MARGIN = 1.05  # a bound that is so much worse than the best estimate ends the search there
COARSE = 4  # every so manieth F_w is tried first
REFINED = 12  # engines whose other F_w are tried
WHOLE = 24  # plans that are simulated whole
FINAL = 10  # plans of those that are simulated for all iterations
CLIMBED = 3  # best plans whose neighbours are tried
SAME_SPLIT = 4  # plans of one split and tp among those that are simulated whole
SMALL = 256  # trajectories that a part of a rollout keeps at least
NEVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the simulated iterations, seconds; `iteration_s` is rollout to train end, and the publish."""

    iteration_s: float
    rollout_s: float
    train_busy_s: float
    first_dispatch_s: float
    publish_s: float
    generated_tokens: float

    @property
    def waiting_s(self) -> float:
        """How long the trainer waited."""
        return max(self.iteration_s - self.publish_s - self.train_busy_s, 0.0)


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


class Judge:
    """Simulates plans, each once."""

    def __init__(self, config: Config, accelerators: int, iterations: int) -> None:
        self.source = _Kept(source_of(config))
        self.iterations = _held(config, self.source, iterations)
        self.config = _quiet(config)
        self.space = space_of(self.config, accelerators)
        samples, groups = config.rollout.trajectories_per_group, range(config.rollout.groups_per_iteration)
        self.work = work_of(config, [self.source.group(group, 0, samples) for group in groups])
        self.bounds = Bounds(self.space, self.work)
        self.rollouts = self.wholes = 0
        self._figures: dict[tuple[Plan, int], Figures] = {}
        self._arrivals: dict[tuple[Engines, int | None], list[tuple[float, int, list[int]]]] = {}

    def whole(self, plan: Plan, iterations: int) -> Figures:
        if (plan, iterations) not in self._figures:
            config = self.space.of(plan)
            config = config.model_copy(update={"run": config.run.model_copy(update={"iterations": iterations})})
            rows = simulate(config, source=self.source).iterations
            self.wholes += iterations

            def mean(key: str) -> float:
                return sum(row[key] or 0.0 for row in rows) / len(rows)

            published = publish_s(config)
            self._figures[plan, iterations] = Figures(
                iteration_s=mean("rollout_to_train_end_s") + published,
                rollout_s=mean("rollout_s"),
                train_busy_s=mean("train_busy_s"),
                first_dispatch_s=mean("first_dispatch_s"),
                publish_s=published,
                generated_tokens=mean("generated_tokens"),
            )
        return self._figures[plan, iterations]

    def estimate_s(self, plan: Plan) -> float:
        """Of one iteration: its engines simulated, its trainer as a queue."""
        arrivals, config = self.arrivals(plan.engines, plan.frontier_groups), self.space.of(plan)
        if not arrivals:
            return 0.0
        costs = trainer_costs(config)
        return max(estimated_s(config, plan.trainer, costs, arrivals) + publish_s(config), self.bounds.iteration_s(plan))

    def arrivals(self, engines: Engines, width: int | None) -> list[tuple[float, int, list[int]]]:
        """(t since the request, submission order, lengths) of every group. Where engines and steps divide, a part of the
        engines with as large a part of the groups is simulated: each of these stands for some that are about as long."""
        if (engines, width) not in self._arrivals:
            parts = self._parts(engines)
            source = self.source if parts == 1 else _Sample(self.work, parts)
            job = SimulatedJob(self._rollout_alone(engines, width, parts), _Nothing(), seen := _Arrivals(), source)
            job.rollout.log = seen
            job.run()
            self.rollouts += 1
            trained = self.work.lengths()
            self._arrivals[engines, width] = [
                (t - seen.requested_t, member if parts > 1 else order, trained[member] if parts > 1 else tokens)
                for t, group, order, tokens in seen.groups
                for member in (source.stands_for[group] if isinstance(source, _Sample) else [group])
            ]
        return self._arrivals[engines, width]

    def _parts(self, engines: Engines) -> int:
        """Into how many equal parts the rollout is cut, of which one is simulated."""
        c = self.config
        if c.rollout.filter != "none":
            return 1
        most = min(c.rollout.groups_per_iteration * c.rollout.trajectories_per_group // SMALL, engines.count // 2)
        whole = math.gcd(engines.count, c.groups_per_step)
        return max(n for n in range(1, whole + 1) if whole % n == 0 and n <= max(most, 1))

    def _rollout_alone(self, engines: Engines, width: int | None, parts: int) -> Config:
        part = Engines(engines.ranks // parts, engines.tp)
        config = self.space.of(Plan(part, _ALONE, None if width is None else -(-width // parts)))
        hardware, c = hardware_of(config), config
        budget = c.admission.budget_tokens
        sections = {
            "hardware": hardware.model_copy(update={"trainer": MeasuredTrainer(micro_batch_s=0.0)}),
            "run": c.run.model_copy(update={"iterations": 1}),
            "rollout": c.rollout.model_copy(update={"groups_per_iteration": c.rollout.groups_per_iteration // parts}),
            "training": c.training.model_copy(update={"trajectories_per_step": c.training.trajectories_per_step // parts}),
            "admission": c.admission.model_copy(update={"budget_tokens": budget and -(-budget // parts)}),
        }
        return config.model_copy(update=sections)


_ALONE = Trainer(1, 1, 1, 1, 1, False)
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
    known = set(plans)
    while True:
        for candidate in plans:
            judge.whole(candidate, judge.iterations)
            watch(judge)
        ranked = _ranked(judge, known)
        best_s = ranked[0][1].iteration_s
        near = {p for best, _ in ranked[:CLIMBED] for p in _neighbours(judge.space, best)} - known
        plans = sorted(p for p in near if judge.bounds.iteration_s(p) < best_s)
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


# ---- what is simulated ----------------------------------------------------------------------------------------------


def _quiet(config: Config) -> Config:
    """The job itself: no evaluation, no checkpoint, nothing that breaks, nothing cut by a deadline."""
    if config.workload is None:
        raise ConfigError("workload: missing; wanted: how long responses are, such as workload.median_tokens=256")
    healthy = {"slow_engines": {}, "lost_engines": {}, "checkpoint_s": 0.0}
    sections = {
        "run": config.run.model_copy(update={"checkpoint_every_iterations": 0}),
        "evaluation": config.evaluation.model_copy(update={"prompts": 0}),
        "rollout": config.rollout.model_copy(update={"trajectory_deadline_s": NEVER_S}),
        "hardware": hardware_of(config).model_copy(update=healthy),
    }
    return config.model_copy(update=sections)


def _held(config: Config, source: Source, iterations: int) -> int:
    """How many iterations' groups the workload holds, up to `iterations`. Raises ConfigError where not even one."""
    first = config.rollout.groups_per_iteration + config.over_sampling_groups
    for iteration in range(iterations):
        try:
            for group in range(iteration * config.most_groups, iteration * config.most_groups + first):
                source.group(group, iteration, config.rollout.trajectories_per_group)
        except ConfigError:
            if iteration == 0:
                raise
            return iteration
    return iterations


class _Kept:
    """A source that draws each group once."""

    def __init__(self, source: Source) -> None:
        self.group = lru_cache(maxsize=None)(source.group)


class _Sample:
    """Groups by their longest response in blocks of `parts`; of each the middle one stands for all, of the first the longest."""

    def __init__(self, work: Work, parts: int) -> None:
        by_length = sorted(range(len(work.groups)), key=lambda g: (-max(work.groups[g].output_tokens), g))
        blocks = [by_length[at : at + parts] for at in range(0, len(by_length), parts)]
        chosen = [(block[parts // 2 if number else 0], block) for number, block in enumerate(blocks)]
        chosen.sort()  # in submission order
        self.stands_for = [block for _, block in chosen]
        self._groups = [work.groups[group] for group, _ in chosen]

    def group(self, group: int, iteration: int, samples: int) -> GroupWork:
        return self._groups[group]


class _Nothing:
    """A log of nothing."""

    def event(self, event: e.Event) -> None:
        pass

    def command(self, t: float, command: e.Command) -> None:
        pass


@dataclass(slots=True)
class _Arrivals(_Nothing):
    """When groups came to the trainer."""

    requested_t: float = 0.0
    groups: list[tuple[float, int, int, list[int]]] = field(default_factory=list)  # t, group, order, lengths

    def event(self, event: e.Event) -> None:
        if isinstance(event, e.GroupArrived):
            self.groups.append((event.t, event.group, event.order, list(event.tokens)))
        elif isinstance(event, e.RolloutRequested):
            self.requested_t = event.t

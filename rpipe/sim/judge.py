"""How long would an iteration of this plan take? Simulated whole, or its rollout alone with a queue for the trainer.

The job itself is simulated: no evaluation, no checkpoint, nothing that breaks, nothing cut by a deadline. Each plan once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from rpipe.config import Config, ConfigError
from rpipe.config_simulation import MeasuredTrainer
from rpipe.core import events as e
from rpipe.sim.bounds import Bounds, Work, estimated_s, work_of
from rpipe.sim.costs import hardware_of, publish_s, trainer_costs
from rpipe.sim.job import SimulatedJob
from rpipe.sim.layouts import Engines, Plan, Trainer
from rpipe.sim.plan_space import space_of
from rpipe.sim.run import simulate
from rpipe.sim.workload import GroupWork, Source, source_of

SMALL = 256  # trajectories that a part of a rollout keeps at least
UNEVEN = 0.04  # by how much U and F_w of a part may differ from their share
NEVER_S = 1e9
ALONE = Trainer(1, 1, 1, 1, 1, False)


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

            published = publish_s(config, plan.engines.count)
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
        trained_s = estimated_s(config, plan.trainer, trainer_costs(config), arrivals)
        return max(trained_s + publish_s(config, plan.engines.count), self.bounds.iteration_s(plan))

    def arrivals(self, engines: Engines, width: int | None) -> list[tuple[float, int, list[int]]]:
        """(t since the request, submission order, lengths) of every group. Of a large rollout a part is simulated, some engines
        and as large a part of groups, U and F_w: each of these groups stands for some that are about as long."""
        if (engines, width) not in self._arrivals:
            part = self.part(engines, width)
            groups = self._share(self.config.groups_per_step, part, engines) * self.config.steps_per_iteration
            sample = _Sample(self.work, groups) if part < engines.count else None
            job = SimulatedJob(self._alone(engines, width, part), _Nothing(), seen := _Arrivals(), sample or self.source)
            job.rollout.log = seen
            job.run()
            self.rollouts += 1
            lengths = self.work.lengths()
            self._arrivals[engines, width] = [
                (t - seen.requested_t, member if sample else order, lengths[member] if sample else tokens)
                for t, group, order, tokens in seen.groups
                for member in (sample.stands_for[group] if sample else [group])
            ]
        return self._arrivals[engines, width]

    def part(self, engines: Engines, width: int | None) -> int:
        """How many of the engines are simulated: the fewest with which U and F_w can be cut alike."""
        c, count = self.config, engines.count
        if c.rollout.filter != "none":
            return count
        trajectories = c.rollout.groups_per_iteration * c.rollout.trajectories_per_group
        cut = [n for n in (c.groups_per_step, width) if n is not None]
        for part in range(max(2, -(-count * SMALL // trajectories)), count):
            if all(abs(self._share(n, part, engines) / (n * part / count) - 1) <= UNEVEN for n in cut):
                return part
        return count

    def _share(self, n: int, part: int, engines: Engines) -> int:
        return max(round(n * part / engines.count), 1)

    def _alone(self, engines: Engines, width: int | None, part: int) -> Config:
        """Engines at F_w with a trainer that takes no time."""
        cut = None if width is None else self._share(width, part, engines)
        config = self.space.of(Plan(Engines(part * engines.tp, engines.tp), ALONE, cut))
        u, k = self._share(config.groups_per_step, part, engines), config.rollout.trajectories_per_group
        budget = config.admission.budget_tokens
        sections = {
            "hardware": hardware_of(config).model_copy(update={"trainer": MeasuredTrainer(micro_batch_s=0.0)}),
            "run": config.run.model_copy(update={"iterations": 1}),
            "rollout": config.rollout.model_copy(update={"groups_per_iteration": u * config.steps_per_iteration}),
            "training": config.training.model_copy(update={"trajectories_per_step": u * k}),
            "admission": config.admission.model_copy(
                update={"budget_tokens": None if budget is None else self._share(budget, part, engines)}
            ),
        }
        return config.model_copy(update=sections)


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
    """Groups by their longest response, in `count` blocks; the middle one stands for all, in the first block the longest."""

    def __init__(self, work: Work, count: int) -> None:
        by_length = sorted(range(len(work.groups)), key=lambda g: (-max(work.groups[g].output_tokens), g))
        ends = [len(by_length) * n // count for n in range(count + 1)]
        blocks = [by_length[a:b] for a, b in pairwise(ends)]
        chosen = [(block[len(block) // 2 if number else 0], block) for number, block in enumerate(blocks)]
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

"""How short can an iteration be at best, whatever the scheduling? And about how long, once the groups' arrivals are known?

`Bounds` never exceeds what a simulation of the plan gives, so that a plan whose bound is worse than a simulated plan's time
need not be simulated (tests/sim/test_plan.py holds every simulated plan against its bound). Lengths are the workload's own.

    rollout    the engines' tokens at the best batch size there is, or the longest response alone
    first      the first group to be complete, were each group's longest response alone
    training   every token's linear cost on the replicas, and the steps' ends
    iteration  serial: rollout + training; streaming: the longer of rollout + the last step's end, and first + training

Jensen's inequality gives the rollout: a decode step costs convexly in running sequences and context, so that no mix of steps
beats the best constant one with the mean context. Where it is not convex (experts, speculation) the least context counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rpipe.config import Config
from rpipe.policy.batching import FILL
from rpipe.sim.costs import EngineCosts, TrainerCosts, engine_costs, hardware_of, publish_s, trainer_costs
from rpipe.sim.layouts import Engines, Plan, Trainer, with_plan
from rpipe.sim.plan_space import Space
from rpipe.sim.shape import shape_of
from rpipe.sim.workload import GroupWork


@dataclass(frozen=True)
class Work:
    """One iteration's groups, in submission order; `kept` are those that are trained on."""

    groups: list[GroupWork]
    kept: list[bool]

    @property
    def tokens(self) -> int:
        return sum(sum(g.output_tokens) for g in self.groups)

    def mean_context(self) -> float:
        """Tokens of context behind a generated token, on average; what an environment answered is left out."""
        whole = sum(n * g.prompt_tokens + n * (n + 1) / 2 for g in self.groups for n in g.output_tokens)
        return whole / self.tokens

    def lengths(self) -> list[list[int]]:
        """Of each group's trajectories, prompt and answers included."""
        return [[g.prompt_tokens + n for n in g.response_tokens] for g in self.groups]

    def trained(self) -> list[list[int]]:
        return [lengths for lengths, kept in zip(self.lengths(), self.kept) if kept]


def work_of(config: Config, groups: list[GroupWork]) -> Work:
    filtered = config.rollout.filter != "none"
    return Work(groups, [not filtered or len(set(g.rewards)) > 1 for g in groups])


class Bounds:
    """Of one iteration's work; each part is computed once."""

    def __init__(self, space: Space, work: Work) -> None:
        config = space.config
        self.config, self.work, self.space = config, work, space
        speculation = config.workload.speculation if config.workload else None
        self._speculation = speculation
        measured = hardware_of(config).engine is not None
        self._convex = speculation is None and (measured or shape_of(config).experts == 1)
        self._costs: dict[int, EngineCosts] = {}
        self._per_token: dict[int, list[float]] = {}  # by tp: at most n run, n from 1
        self._longest: dict[int, tuple[float, float]] = {}  # by tp: the longest response, the first group
        self._training: dict[Trainer, tuple[float, float]] = {}
        self._publish_s: dict[int, float] = {}  # by engines

    def iteration_s(self, plan: Plan) -> float:
        training_s, step_s = self.training_s(plan.trainer)
        rollout_s, first_s = self.rollout_s(plan.engines, plan.frontier_groups), self._alone(plan.engines)[1]
        if self.config.pipeline.mode == "serial":
            return rollout_s + training_s + self._published_s(plan.engines)
        return max(rollout_s + step_s, first_s + training_s) + self._published_s(plan.engines)

    def _published_s(self, engines: Engines) -> float:
        if engines.count not in self._publish_s:
            self._publish_s[engines.count] = publish_s(self.config, engines.count)
        return self._publish_s[engines.count]

    def rollout_s(self, engines: Engines, width: int | None) -> float:
        running = self.config.engine.max_running
        if width is not None and _hard(self.config):
            running = min(running, math.ceil(width * self.config.rollout.trajectories_per_group / engines.count))
        together_s = self.work.tokens / engines.count * self._token_s(engines)[max(running, 1) - 1]
        return max(together_s, self._alone(engines)[0])

    def training_s(self, trainer: Trainer) -> tuple[float, float]:
        """All of it, and one step's end."""
        if trainer not in self._training:
            costs = trainer_costs(with_plan(self.config, Plan(self.space.engines[0], trainer, None)))
            groups, u = self.work.trained(), self.config.groups_per_step
            steps = math.ceil(len(groups) / u)
            lengths = [n for group in groups for n in group]
            linear_s = costs.micro_batch_s(lengths) - costs.micro_batch_s([])
            fixed_s = steps * costs.micro_batch_s([])
            at_best_s = linear_s / trainer.replicas / costs.pp + fixed_s  # of a pipeline without a bubble
            self._training[trainer] = (at_best_s + steps * costs.step_s(), costs.step_s())
        return self._training[trainer]

    def _engine(self, engines: Engines) -> EngineCosts:
        if engines.tp not in self._costs:
            trainer = next(t for found in self.space.trainers.values() for t in found)
            self._costs[engines.tp] = engine_costs(with_plan(self.config, Plan(engines, trainer, None)))
        return self._costs[engines.tp]

    def _step_s(self, costs: EngineCosts, running: int, context: float) -> float:
        """Per token that one sequence commits."""
        plain_s, s = costs.decode_s(running, context), self._speculation
        if s is None or running > s.max_running:
            return plain_s
        return plain_s * s.step_cost / s.accepted_tokens

    def _token_s(self, engines: Engines) -> list[float]:
        """Engine seconds a token, at best, while at most n = 1, 2, ... run."""
        if engines.tp in self._per_token:
            return self._per_token[engines.tp]
        costs, prompt = self._engine(engines), min(g.prompt_tokens for g in self.work.groups)
        context = self.work.mean_context() if self._convex else float(prompt)
        room = costs.kv_tokens / max(context - prompt, 1.0)  # sequences that the cache holds on average
        best, found = math.inf, []
        for n in range(1, self.config.engine.max_running + 1):
            if n <= max(room, 1.0) + 1:
                best = min(best, self._step_s(costs, n, n * context) / n)
            found.append(best)
        return self._per_token.setdefault(engines.tp, found)

    def _alone(self, engines: Engines) -> tuple[float, float]:
        if engines.tp not in self._longest:
            costs = self._engine(engines)
            ends = sorted(
                max((n - 1) * self._step_s(costs, 1, g.prompt_tokens + n / 2) for n in g.output_tokens)
                for g in self.work.groups
            )
            self._longest[engines.tp] = (ends[-1], ends[0])
        return self._longest[engines.tp]


def _hard(config: Config) -> bool:
    """Whether at most F_w groups are in service."""
    return config.admission.policy == "frontier"


# ---- an estimate ----------------------------------------------------------------------------------------------------


def estimated_s(config: Config, trainer: Trainer, costs: TrainerCosts, arrivals: list[tuple[float, int, list[int]]]) -> float:
    """From the request to the last step's end: (t, order, lengths) of each group through a queue of U groups a step."""
    mode, u, peers = config.pipeline.mode, config.groups_per_step, trainer.replicas * trainer.ep
    queue = sorted(arrivals, key=lambda a: a[:2] if mode == "fifo" else (a[1], a[0]))
    fixed_s, step_s = costs.micro_batch_s([]), costs.step_s()
    free_t = max(t for t, _, _ in queue) if mode == "serial" else 0.0
    at = 0
    while at < len(queue):
        end = min(at + u, len(queue))
        while at < end:
            free_t = max(free_t, queue[at][0])
            taken: list[int] = []
            while at < end and queue[at][0] <= free_t:
                taken += queue[at][2]
                at += 1
            each = math.ceil(sum(taken) / (config.training.micro_batch_tokens * peers))  # micro-batches of a replica
            if costs.pp > 1:
                each = max(each, min(FILL * costs.pp, math.ceil(len(taken) / peers)))
            calls = math.ceil(each / (FILL * costs.pp)) if costs.pp > 1 else each
            together_s = (costs.micro_batch_s(taken) - fixed_s) / trainer.replicas + each * fixed_s
            ends_s = calls * (costs.pp - 1) * together_s / each
            free_t += max((together_s + ends_s) / costs.pp, costs.micro_batch_s([max(taken)]))
        free_t += step_s
    return free_t

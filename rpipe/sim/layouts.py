"""What is a plan, and which keys of a run file is it?

Three choices: engines (how many ranks roll out, tp of each), a trainer (how many ranks train, tp, pp, cp, ep, recompute) and
how many groups may be in service (F_w).
"""

from __future__ import annotations

from dataclasses import dataclass

from rpipe.config import Config


@dataclass(frozen=True, slots=True, order=True)
class Engines:
    ranks: int
    tp: int

    @property
    def count(self) -> int:
        return self.ranks // self.tp


@dataclass(frozen=True, slots=True, order=True)
class Trainer:
    ranks: int
    tp: int
    pp: int
    cp: int
    ep: int
    recompute: bool

    @property
    def lockstep(self) -> int:
        return self.tp * self.pp * self.cp * self.ep

    @property
    def replicas(self) -> int:
        return self.ranks // self.lockstep


@dataclass(frozen=True, slots=True, order=True)
class Plan:
    """`frontier_groups` is None where admission has no such width, or the soft frontier finds its own."""

    engines: Engines
    trainer: Trainer
    frontier_groups: int | None


def plan_of(config: Config) -> Plan:
    """The config's own choices."""
    c, t = config.cluster, config.training
    recompute = t.recompute == "full"
    trainer = Trainer(c.training_ranks, t.tp, t.pp, t.cp, t.ep, recompute)
    admission = config.admission
    found = admission.policy == "soft_frontier" and admission.frontier_groups == "auto"
    width = None if found or admission.policy == "fifo" else config.frontier_groups
    return Plan(Engines(c.rollout_ranks, config.engine.tp), trainer, width)


def keys_of(plan: Plan) -> dict[str, int | str]:
    """The plan as a run file has it."""
    engines, trainer = plan.engines, plan.trainer
    keys: dict[str, int | str] = {
        "cluster.rollout_ranks": engines.ranks,
        "cluster.training_ranks": trainer.ranks,
        "engine.tp": engines.tp,
        "training.tp": trainer.tp,
        "training.pp": trainer.pp,
        "training.cp": trainer.cp,
        "training.ep": trainer.ep,
        "training.recompute": _word(trainer),
    }
    if plan.frontier_groups is not None:
        keys["admission.frontier_groups"] = plan.frontier_groups
    return keys


def with_plan(config: Config, plan: Plan) -> Config:
    """The config with the plan's keys; unchecked, as its parts were."""
    config = with_trainer(with_engines(config, plan.engines), plan.trainer)
    if plan.frontier_groups is None:
        return config
    return config.model_copy(
        update={"admission": config.admission.model_copy(update={"frontier_groups": plan.frontier_groups})}
    )


def with_engines(config: Config, engines: Engines) -> Config:
    cluster = config.cluster.model_copy(update={"rollout_ranks": engines.ranks})
    return config.model_copy(update={"cluster": cluster, "engine": config.engine.model_copy(update={"tp": engines.tp})})


def with_trainer(config: Config, trainer: Trainer) -> Config:
    keys = {"tp": trainer.tp, "pp": trainer.pp, "cp": trainer.cp, "ep": trainer.ep, "recompute": _word(trainer)}
    training = config.training.model_copy(update=keys)
    cluster = config.cluster.model_copy(update={"training_ranks": trainer.ranks})
    return config.model_copy(update={"cluster": cluster, "training": training})


def _word(trainer: Trainer) -> str:
    return "full" if trainer.recompute else "none"

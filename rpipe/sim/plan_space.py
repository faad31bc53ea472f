"""Which plans for N accelerators could run this job at all? And why could the others not, counted by reason.

What measured hardware was not measured for stays as the config has it. Stages on two kinds of accelerators keep their split.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from rpipe.config import Config, ConfigError
from rpipe.config_rules import problems
from rpipe.policy.seating import Node, SeatingError, parts, together
from rpipe.policy.width import steps
from rpipe.sim.costs import engine_costs, hardware_of
from rpipe.sim.layouts import Engines, Plan, Trainer, plan_of, with_engines, with_plan, with_trainer
from rpipe.sim.memory import FIT, EngineMemory, TrainerMemory, engine_memory, trainer_memory
from rpipe.sim.shape import Shape, shape_of

NODE = 8  # accelerators, where the hardware does not say it
WIDEST_TP = 64


@dataclass
class Space:
    """All plans that could run: every engines x trainer that add up to N and can be seated, x every width."""

    config: Config
    accelerators: int
    engines: list[Engines] = field(default_factory=list)
    trainers: dict[int, list[Trainer]] = field(default_factory=dict)  # by ranks
    widths: list[int | None] = field(default_factory=list)
    pruned: Counter[str] = field(default_factory=Counter)
    kv_tokens: dict[int, int] = field(default_factory=dict)  # of an engine, by tp
    memory: dict[Trainer, TrainerMemory] = field(default_factory=dict)  # empty where nothing is known of the accelerator

    @property
    def node(self) -> int:
        return _node(self.config)

    @property
    def apart(self) -> bool:
        """Whether the stages have accelerators of two kinds."""
        return hardware_of(self.config).training_accelerator is not None

    def seats(self, engines: Engines, trainer: Trainer) -> bool:
        """Whether every engine and every tensor-parallel group finds a node that holds it."""
        if self.apart:  # each kind fills its own nodes; what divides them fits
            return True
        return _seats(self.accelerators, self.node, engines, trainer.tp)

    def pairs(self) -> Iterator[tuple[Engines, Trainer]]:
        for engines in self.engines:
            for trainer in self.trainers.get(self.accelerators - engines.ranks, ()):
                if self.seats(engines, trainer):
                    yield engines, trainer

    def plans(self) -> Iterator[Plan]:
        for engines, trainer in self.pairs():
            for width in self.widths:
                yield Plan(engines, trainer, width)

    def of(self, plan: Plan) -> Config:
        return with_plan(self.config, plan)

    def refusal(self, plan: Plan) -> str:
        """Why this plan cannot run; empty if it can."""
        engines, trainer = plan.engines, plan.trainer
        reason = _engine_refusal(self, engines)
        if reason:
            return f"engine.tp = {engines.tp} {reason}"
        reason = _trainer_refusal(self, trainer)
        if reason or self.seats(engines, trainer):
            return f"the trainer {reason}" if reason else ""
        return "an engine or a tensor-parallel group would lie on two nodes"

    def engine_memory(self, engines: Engines) -> EngineMemory | None:
        if hardware_of(self.config).engine is not None:
            return None
        config = with_engines(self.config, engines)
        return engine_memory(config, shape_of(config), self.kv_tokens[engines.tp])


def space_of(config: Config, accelerators: int) -> Space:
    """Raises ConfigError, one line, where no layout can run."""
    if accelerators < 2:
        raise ConfigError(f"--accelerators {accelerators}: one must roll out and one train; wanted: at least 2")
    space = Space(config, accelerators, widths=_widths(config))
    rollout = training = range(1, accelerators)
    if space.apart:
        cluster = config.cluster
        rollout, training = (
            range(cluster.rollout_ranks, cluster.rollout_ranks + 1),
            range(cluster.training_ranks, cluster.training_ranks + 1),
        )
        if accelerators != cluster.rollout_ranks + cluster.training_ranks:
            raise ConfigError(
                f"--accelerators {accelerators}: hardware.training_accelerator is of another kind than hardware.accelerator, so"
                f" the split stays; wanted: {cluster.rollout_ranks + cluster.training_ranks}, or other cluster.*_ranks"
            )
    for ranks in rollout:
        _add_engines(space, ranks)
    for ranks in training:
        _add_trainers(space, ranks)
    if not space.engines or not any(space.trainers.values()):
        what = "engines" if not space.engines else "a trainer"
        raise ConfigError(f"{accelerators} accelerators: no layout of {what} can run: {_most(space.pruned, what)}")
    seated = set(space.pairs())
    for engines in space.engines:
        for trainer in space.trainers.get(accelerators - engines.ranks, ()):
            if (engines, trainer) not in seated:
                space.pruned["split: an engine or a tensor-parallel group would lie on two nodes"] += len(space.widths)
    if not seated:
        raise ConfigError(
            f"{accelerators} accelerators: engines and trainers that fit do not add up to {accelerators}: "
            + _most(space.pruned, "")
        )
    return space


def _most(pruned: Counter[str], what: str) -> str:
    kind = {"engines": "engines:", "a trainer": "trainer:", "": ""}[what]
    named = [(reason, n) for reason, n in pruned.most_common() if reason.startswith(kind)]
    return "; ".join(f"{reason.removeprefix(kind).strip()} ({n})" for reason, n in named[:3])


def _widths(config: Config) -> list[int | None]:
    """F_w: 1, 2, 3, 4, 6, 8, 12, ... R; a hard step of 1.5 at most. None alone where nobody is to choose it."""
    if plan_of(config).frontier_groups is None:
        return [None]
    return [*steps(config.rollout.groups_per_iteration)]


def _node(config: Config) -> int:
    accelerator = hardware_of(config).accelerator
    return accelerator.accelerators_per_node if accelerator is not None else NODE


def _training_node(config: Config) -> int:
    accelerator = hardware_of(config).training_accelerator or hardware_of(config).accelerator
    return accelerator.accelerators_per_node if accelerator is not None else NODE


@lru_cache(maxsize=100_000)
def _seats(accelerators: int, node: int, engines: Engines, tp: int) -> bool:
    nodes = [Node(str(index), min(node, accelerators - index * node)) for index in range(-(-accelerators // node))]
    try:
        together(nodes, parts(engines.ranks, engines.tp, accelerators - engines.ranks, tp, 1, 1))
    except SeatingError:
        return False
    return True


# ---- engines --------------------------------------------------------------------------------------------------------


def _add_engines(space: Space, ranks: int) -> None:
    config = space.config
    measured = hardware_of(config).engine is not None
    for tp in _powers(min(space.node, WIDEST_TP)) if not measured else [config.engine.tp]:
        reason = ""
        if ranks % tp:
            reason = "does not divide the rollout ranks"
        elif tp > ranks:
            continue
        if not reason:
            reason = _engine_refusal(space, Engines(ranks, tp))
        if reason:
            space.pruned[f"engines: tp {tp} {reason}"] += 1
        else:
            space.engines.append(Engines(ranks, tp))
    if measured:
        space.pruned[f"engines: hardware.engine was measured at engine.tp = {config.engine.tp} alone"] += 1


def _engine_refusal(space: Space, engines: Engines) -> str:
    config = with_engines(space.config, engines)
    hardware = hardware_of(config)
    shape = None if hardware.engine is not None else shape_of(config)
    if shape is not None and max(engines.tp, shape.kv_heads) % min(engines.tp, shape.kv_heads):
        return f"does not divide the model's {shape.kv_heads} key-value heads"
    if engines.tp not in space.kv_tokens:
        try:
            space.kv_tokens[engines.tp] = engine_costs(config).kv_tokens
        except ConfigError:
            return "leaves no room for KV cache beside the weights"
    tokens = space.kv_tokens[engines.tp]
    longest = (config.workload.prompt_tokens if config.workload else 1) + config.rollout.max_new_tokens
    if tokens < longest:
        return f"holds less KV cache than one trajectory may need ({longest:,} tokens)"
    if shape is not None and hardware.accelerator is not None:
        memory = engine_memory(config, shape, tokens)
        if memory.total > hardware.accelerator.memory_bytes * hardware.memory_share * 1.0001:
            return f"does not hold weights and engine.kv_tokens = {tokens:,}"
    return _rules(config)


# ---- trainers -------------------------------------------------------------------------------------------------------


def _add_trainers(space: Space, ranks: int) -> None:
    found = space.trainers.setdefault(ranks, [])
    for trainer in _trainers(space, ranks):
        reason = _trainer_refusal(space, trainer)
        if reason:
            space.pruned[f"trainer: {reason}"] += 1
            continue
        plain = replace(trainer, recompute=False)
        if trainer.recompute and plain in found:
            space.pruned["trainer: recompute = full is slower, and the activations fit without it"] += 1
            continue
        found.append(trainer)


def _trainers(space: Space, ranks: int) -> Iterator[Trainer]:
    """Those whose lockstep domains fill the ranks, plain before recomputing."""
    config, t = space.config, space.config.training
    if hardware_of(config).trainer is not None:
        space.pruned["trainer: hardware.trainer was measured with the config's layout alone"] += 1
        own = Trainer(ranks, t.tp, t.pp, t.cp, t.ep, t.recompute == "full")
        if ranks % own.lockstep == 0:
            yield own
        return
    shape = shape_of(config)
    for recompute in (False, True):
        for tp in _powers(_training_node(config)):
            for pp in _divisors(shape.layers):
                for cp in _powers(ranks):
                    for ep in _divisors(shape.experts):
                        trainer = Trainer(ranks, tp, pp, cp, ep, recompute)
                        if trainer.lockstep <= ranks and ranks % trainer.lockstep == 0:
                            yield trainer


def _trainer_refusal(space: Space, trainer: Trainer) -> str:
    config = with_trainer(space.config, trainer)
    hardware = hardware_of(config)
    accelerator = hardware.training_accelerator or hardware.accelerator
    if hardware.trainer is not None or accelerator is None:
        return _rules(config)
    shape = shape_of(config)
    reason = _cut_refusal(shape, trainer) or _rules(config)
    if reason:
        return reason
    memory = trainer_memory(config, shape)
    room = accelerator.memory_bytes * FIT
    if memory.total - memory.activations > room:
        return f"weights, gradients and optimizer do not fit into {room / 1e9:.0f} GB"
    if memory.total > room:
        return f"a micro-batch's activations do not fit beside the weights into {room / 1e9:.0f} GB"
    space.memory[trainer] = memory
    return ""


def _cut_refusal(shape: Shape, trainer: Trainer) -> str:
    if shape.kv_heads % trainer.tp:
        return f"tp {trainer.tp} does not divide the model's {shape.kv_heads} key-value heads"
    if shape.experts > 1 and trainer.tp > 1:
        return "tp: a model with experts is cut by ep, pp and cp"
    return ""


def _rules(config: Config) -> str:
    """What a run file of it would be refused for, without its figures."""
    for problem in problems(config):
        return re.sub(r"\d+", "n", problem).split(";")[0]
    return ""


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]

"""How does a rollout rank come up?

Data and model first (what a person typed wrong ends the job before any engine starts), then the torch channel to the trainer
in a thread while the engine starts, then the role's loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rpipe.config import Config
from rpipe.core.eventlog import EventLog
from rpipe.core.types import Prompt
from rpipe.data import gguf_model
from rpipe.data.entry import DataError
from rpipe.data.make_model import load_tokenizer, make_model
from rpipe.data.order import Order
from rpipe.data.prompts import load_data
from rpipe.data.supervised import supervised
from rpipe.rollout.driver import RolloutDriver
from rpipe.rollout.engine import Engine
from rpipe.rollout.held import RolloutData
from rpipe.rollout.kept import KeptGroups
from rpipe.rollout.watch import Watch
from rpipe.rollout.worker import EngineOwner
from rpipe.runtime import device as devices
from rpipe.runtime.channel import open_channel
from rpipe.runtime.claim import require
from rpipe.runtime.dump import TrajectoryDump
from rpipe.runtime.mailbox import Mailbox
from rpipe.runtime.messages import CloseEngine
from rpipe.runtime.progress import Progress
from rpipe.runtime.rundir import RunDir
from rpipe.runtime.scalars import Scalars
from rpipe.runtime.side_group import serve_store
from rpipe.runtime.world import World, WorldError, quiet_barrier
from rpipe.training import convert, memory
from rpipe.training.hf import Shape, read_shape

POLL_S, PARK_S = 0.002, 0.005  # of a rank with an engine, and of one that only waits


async def run(config: Config, world: World, run_dir: RunDir, log: EventLog, mailbox: Mailbox) -> str:
    """This rank's part of rollout; returns why it ended, "" at a normal end."""
    if not world.is_coordinator:
        quiet_barrier(world.comm, config.limits.start_s, "the model and the prompts to be read")
        world.comm.bcast(None)
        owner = _owner(config, world, run_dir) if world.role_rank % config.engine.tp == 0 else None
        world.waits = lambda: [owner.state() if owner is not None else "parked beside its engine", *mailbox.states()]
        return await serve(config, mailbox, owner)
    terminal, columns = os.environ.get("RPIPE_TERMINAL") == "1", int(os.environ.get("COLUMNS", "0")) or None
    watch = Watch(config, Progress(terminal, columns), Scalars(run_dir.tensorboard))
    try:
        return await coordinate(config, world, run_dir, log, mailbox, watch)
    finally:
        watch.close()


async def coordinate(config: Config, world: World, run_dir: RunDir, log: EventLog, mailbox: Mailbox, watch: Watch) -> str:
    """The coordinator's rank: model and prompts, the channel, then the loop."""
    watch.say("reading the model and the prompts" if config.model.path is not None else "making the model, reading the prompts")
    data = load(config, run_dir)
    for line in fits(config, read_shape(run_dir.model_of(config)), world.hosts):
        watch.say(line)
    quiet_barrier(world.comm, config.limits.start_s, "the model and the prompts to be read")
    store = serve_store(world.address(config.cluster.interface), config.limits.start_s)
    where = world.comm.bcast((store.host, store.port))
    for note in data.notes:
        watch.say(note)
    engines = f"{config.engines} engine{'s' if config.engines > 1 else ''} ({config.engine.kind})"
    watch.say(f"starting {engines} and {config.replicas} x {config.cluster.training_ranks // config.replicas} training ranks")
    device = devices.select("cpu" if config.backend == "gloo" else config.cluster.accelerator)
    meet = partial(open_channel, where, 0, config.backend, device, config.limits.message_s, store)
    channel = await asyncio.to_thread(meet)
    dump = TrajectoryDump(run_dir.trajectories, require=partial(require, run_dir))
    owner = _owner(config, world, run_dir)
    printed = run_dir.logs / "rewards.log"  # what reward functions print
    kept = KeptGroups(run_dir.iteration_groups, config, run_dir.checkpoints_found)
    reason = await RolloutDriver(config, world, log, mailbox, channel, data, dump, watch, printed, kept).run(owner)
    channel.close()
    return reason


async def serve(config: Config, mailbox: Mailbox, owner: EngineOwner | None) -> str:
    """A rank that is not the coordinator: its engine's messages until CloseEngine. Without an engine it only waits."""
    coordinator = 0
    if owner is not None:
        owner.reply = lambda message: mailbox.send(coordinator, message)
        owner.start()
    try:
        while True:
            for _, message in mailbox.poll():
                if isinstance(message, CloseEngine):
                    break
                assert owner is not None
                owner.handle(message)
            else:
                mailbox.check_silence(config.limits.message_s, lambda: "the rollout coordinator")
                await asyncio.sleep(PARK_S if owner is None else POLL_S)
                continue
            break
    finally:
        if owner is not None:
            await owner.close()
    mailbox.drain(config.limits.stop_s)  # not where the coordinator is silent: it would take nothing
    return ""


def load(config: Config, run_dir: RunDir) -> RolloutData:
    """Model folder, tokenizer and prompts, checked against each other; raises DataError before anything is started."""
    if config.model.make is not None:
        make_model(config.model.make, run_dir.model, config.run.seed)
    elif config.model.gguf is not None:
        gguf_model.convert(config.model)
    folder = run_dir.model_of(config)
    tokenizer = load_tokenizer(folder)
    train, held_out = load_data(config.data, tokenizer, Path.cwd())
    check(config, read_shape(folder), [*train, *(held_out or ())])
    if config.model.warm_up is not None:
        supervised(train, tokenizer, tokenizer.eos_token_id)  # raises where a prompt has no worked solution
    notes = [s.note for s in (train, held_out) if s is not None and s.note]
    if held_out is not None and len(held_out) < config.evaluation.prompts:
        notes.append(
            f"evaluation.prompts = {config.evaluation.prompts}, but data.held_out has {len(held_out)}: all of them are used"
        )
    if config.rollout.trajectories_per_group == 1:
        notes.append(
            "rollout.trajectories_per_group = 1: a trajectory has no siblings to be better than; nothing will be learned"
        )
    return RolloutData(
        train=train,
        held_out=list(held_out or ())[: config.evaluation.prompts],
        order=Order(len(train), config.run.seed, config.data.shuffle),
        reward_functions={**(held_out.rewards if held_out else {}), **train.rewards},
        encode=lambda text: [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]],
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        notes=notes,
    )


def check(config: Config, shape: Shape, prompts: list[Prompt]) -> None:
    """Raises DataError where model, parallel sizes, prompts and lengths do not go together."""
    heads = f"the model's {shape.heads} heads and {shape.kv_heads} key-value heads"
    try:
        convert.check_layout(shape, config.training)
    except ValueError as error:
        raise DataError(str(error)) from None
    if shape.heads % config.engine.tp:  # key-value heads may be copied there
        raise DataError(f"engine.tp = {config.engine.tp} does not divide {heads}")
    if shape.experts and shape.tied and config.engine.kind == "sglang":  # it would serve an output layer of chance
        raise DataError("SGLang serves no Qwen3-MoE whose output layer is the embedding; wanted: model.make.tied = false")
    context = config.engine.context_tokens or shape.max_positions
    longest = max(prompts, key=lambda p: len(p.token_ids))
    wanted = len(longest.token_ids) + config.rollout.max_new_tokens
    if wanted > context:
        raise DataError(
            f"{longest.prompt_id}: its {len(longest.token_ids)} tokens and rollout.max_new_tokens ="
            f" {config.rollout.max_new_tokens} exceed the context of {context} tokens"
        )


def fits(config: Config, shape: Shape, hosts: Sequence[str]) -> list[str]:
    """The plan of what each role's ranks will hold. Raises DataError where that is more than there is."""
    found = memory.needs(config, shape)
    there = config.cluster.device_memory_bytes or devices.memory_bytes(config.cluster.accelerator)
    why = memory.problem(config, found, there, hosts)
    if why:
        raise DataError(why)
    return [need.line() for need in found]


def _owner(config: Config, world: World, run_dir: RunDir) -> EngineOwner:
    index = world.role_rank // config.engine.tp
    if len(set(world.hosts[world.rank : world.rank + config.engine.tp])) > 1:
        raise WorldError(
            f"engine {index}: its {config.engine.tp} ranks are on several hosts; wanted: whole engines on each host"
        )
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    return EngineOwner(_engine(config, index, run_dir), index, config, world.clock, run_dir.snapshots)


def _engine(config: Config, index: int, run_dir: RunDir) -> Engine:
    if config.engine.kind == "scripted":
        from rpipe.rollout.scripted_engine import ScriptedEngine

        scripted: Any = ScriptedEngine.from_config(config, index)
        return scripted  # type: ignore[no-any-return]
    from rpipe.rollout.sglang_engine import SglangEngine

    first = 0 if config.cluster.share_device else devices.local_rank()
    slots = None if config.cluster.accelerator == "cpu" else tuple(range(first, first + config.engine.tp))
    return SglangEngine(config, index, run_dir.model_of(config), run_dir.logs, slots)

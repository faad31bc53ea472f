"""How does a training rank come up?

The role's torch world, Megatron over it, then the newest checkpoint or the supervised warm-up; meanwhile the engines start.
Then the loop begins, with a first publish to all of them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpipe.config import BACKENDS, Config
from rpipe.core.eventlog import EventLog
from rpipe.core.types import Sequences
from rpipe.runtime import checkpoints
from rpipe.runtime import device as devices
from rpipe.runtime.channel import Channel, open_channel
from rpipe.runtime.claim import attempts, require
from rpipe.runtime.mailbox import Mailbox
from rpipe.runtime.messages import EnginesUp, Standing, Stop, TrainerState
from rpipe.runtime.rundir import RunDir
from rpipe.runtime.stop import STOPPED
from rpipe.runtime.world import World, quiet_barrier, role_world
from rpipe.training.driver import ROLLOUT, TrainingDriver
from rpipe.training.publish import Publisher
from rpipe.training.snapshot import Snapshots
from rpipe.training.worker import POLL_S, TrainingWorker

if TYPE_CHECKING:
    from rpipe.training.megatron import MegatronTrainer


def run(config: Config, world: World, run_dir: RunDir, log: EventLog, mailbox: Mailbox) -> str:
    """This rank's part of training; returns why it ended, "" at a normal end."""
    devices.prepare(config.cluster.accelerator)
    device = devices.select(config.cluster.accelerator, 0 if config.cluster.share_device else None)
    role_world(world, BACKENDS[config.cluster.accelerator], config.cluster.interface, config.limits.collective_s)
    import rpipe.training.megatron  # noqa: F401  (seconds of import, while the rollout side makes the model)

    quiet_barrier(world.comm, config.limits.start_s, "the model and the prompts to be read")
    where = world.comm.bcast(None)
    channel_device = devices.select("cpu") if config.backend == "gloo" else device
    # Opened before anything slow: the rollout side starts its engines when it stands.
    groups = open_channel(where, 1, config.backend, channel_device, config.limits.message_s) if world.is_coordinator else None
    trainer = build(config, run_dir)
    try:
        start = resume(config, world, run_dir, trainer, log, mailbox)
    except StopAsked:
        if world.is_coordinator:
            mailbox.send(ROLLOUT, Stop(STOPPED))
        return STOPPED
    worker = TrainingWorker(config, world, run_dir, trainer)
    batches = Channel(None, devices.select("cpu"))  # over the role's world, which carries host tensors by gloo
    if groups is None:
        return worker.serve(mailbox, batches)
    _wait_for_engines(config, mailbox)
    worker.publisher = open_publisher(config, world, run_dir, trainer)
    mailbox.send(ROLLOUT, Standing(start["iteration"], start["cursor"]))
    reason = TrainingDriver(config, worker, log, mailbox, groups, batches).run(start["iteration"], start["cursor"])
    groups.close()
    worker.publisher.close()
    return reason


def build(config: Config, run_dir: RunDir) -> MegatronTrainer:
    from rpipe.training.megatron import MegatronTrainer

    return MegatronTrainer(config, run_dir.model_of(config))


def resume(
    config: Config, world: World, run_dir: RunDir, trainer: MegatronTrainer, log: EventLog, mailbox: Mailbox
) -> dict[str, Any]:
    """Load the newest checkpoint, else warm up; returns where the run goes on (iteration, cursor). Collective in the role."""
    found = run_dir.checkpoints_found() if config.run.resume == "auto" else []
    found = world.role_comm.bcast(found)
    if found:
        started_t = world.clock()
        checkpoint, extra = load(trainer, found, world.is_coordinator, partial(require, run_dir))
        log.note(world.clock(), "Resumed", checkpoint=checkpoint.name, started_t=started_t, **extra)
        return extra
    if config.model.warm_up is not None:
        started_t = world.clock()
        tell(mailbox, world, f"warming up the model: {config.model.warm_up.steps} supervised steps")
        loss = warm_up(config, world, run_dir, trainer, mailbox)
        log.note(world.clock(), "WarmedUp", steps=config.model.warm_up.steps, loss=loss, started_t=started_t)
        tell(mailbox, world, "")
    return {"iteration": 0, "version": 0, "cursor": 0}


def load(
    trainer: MegatronTrainer, found: list[Path], speaks: bool, may_write: Callable[[], None]
) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint that is whole, and what it says; damaged ones before it are set aside, with a line each.

    All training ranks come to the same one. Raises ValueError where none can be read. `may_write` raises where a newer attempt
    owns the run: what looked damaged may be what that one is just writing.
    """
    damaged: list[str] = []
    for number, path in enumerate(found):
        try:
            extra = trainer.load(path)
        except checkpoints.Damaged as error:
            damaged.append(str(error))
            if speaks and number + 1 < len(found):
                print(f"{error}; going on from {found[number + 1].name}", flush=True)
            continue
        if speaks:
            for old in found[:number]:
                may_write()
                checkpoints.set_aside(old)
        return path, extra
    raise ValueError(checkpoints.none_whole(found[0].parent, damaged))


def tell(mailbox: Mailbox, world: World, text: str) -> None:
    """What the trainer does before its loop, for the progress display."""
    if world.is_coordinator:
        mailbox.send(ROLLOUT, TrainerState(bool(text), text, 0))


def warm_up(config: Config, world: World, run_dir: RunDir, trainer: MegatronTrainer, mailbox: Mailbox) -> float:
    """Supervised steps on the training prompts' own solutions; returns the last loss."""
    from rpipe.data.make_model import load_tokenizer
    from rpipe.data.prompts import load_prompts
    from rpipe.data.supervised import supervised_batches

    assert config.model.warm_up is not None
    tokenizer = load_tokenizer(run_dir.model_of(config))
    prompts = load_prompts(config.data.train, tokenizer, config.data.max_prompt_tokens, Path.cwd())
    plan = config.model.warm_up
    batches = supervised_batches(
        prompts, tokenizer, tokenizer.eos_token_id, plan.sequences_per_step, plan.steps, config.run.seed
    )
    return trainer.warm_up(_beating(batches, mailbox, world), plan.learning_rate, config.training.micro_batch_tokens)


class StopAsked(Exception):
    """The job was asked to stop before its loop began."""


def _beating(batches: Iterator[Sequences], mailbox: Mailbox, world: World) -> Iterator[Sequences]:
    """The same batches; between them the peers hear that this rank lives, and all ranks ask whether one was told to stop."""
    for batch in batches:
        mailbox.beat()
        if any(world.role_comm.allgather(world.stop_reason)):
            raise StopAsked
        yield batch


def open_publisher(config: Config, world: World, run_dir: RunDir, trainer: MegatronTrainer) -> Publisher:
    """Through which all versions go to the engines, and to the disk."""
    for number in attempts(run_dir.path):
        if number < run_dir.attempt:  # it was killed
            shutil.rmtree(RunDir(run_dir.path, number).snapshots, ignore_errors=True)
    source, limit_s = run_dir.model_of(config), config.limits.collective_s
    snapshots = Snapshots(run_dir.snapshot if config.engine.restarts else None, source, config.dtype, limit_s)
    return Publisher(config, world.address(config.cluster.interface), trainer.weight_specs(), snapshots)


def _wait_for_engines(config: Config, mailbox: Mailbox) -> None:
    while True:
        for _, message in mailbox.poll():
            if isinstance(message, EnginesUp):
                return
        mailbox.check_silence(config.limits.start_s, lambda: "the engines to start")
        time.sleep(POLL_S)

"""What does a training rank do?

The same for all: take work in the order in which it comes and do it on the trainer. The coordinator's rank does this between
messages; the others do nothing else.

    waits for            unblocked by                          bounded by
    the next work        the training coordinator              limits.message_s
    a gradient's peers   the other training ranks              limits.collective_s
    engines to take      the engines (coordinator's rank)      engine.stall_deadline_s, then without that engine
    weights
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from rpipe.config import Config
from rpipe.core.events import (
    BeginStep,
    FinishStep,
    MicroBatchDone,
    PublishWeights,
    SaveCheckpoint,
    StopTraining,
    TrainMicroBatch,
)
from rpipe.core.types import Sequences, Version
from rpipe.runtime import checkpoints
from rpipe.runtime import device as devices
from rpipe.runtime.channel import Channel, unpack
from rpipe.runtime.claim import require
from rpipe.runtime.mailbox import Mailbox
from rpipe.runtime.messages import BatchDone, Published, Work
from rpipe.runtime.rundir import RunDir
from rpipe.runtime.world import World
from rpipe.training.trainer import StepStats, Trainer

if TYPE_CHECKING:
    from rpipe.training.publish import Publisher

POLL_S = 0.001


@dataclass(slots=True)
class Outcome:
    """What came of one piece of work, where anything did."""

    started_t: float
    ended_t: float
    stats: StepStats | None = None
    nbytes: int = 0
    published: Published | None = None
    path: str = ""


class TrainingWorker:
    """`publisher` is set on the coordinator's rank only."""

    publisher: Publisher | None = None

    def __init__(self, config: Config, world: World, run_dir: RunDir, trainer: Trainer) -> None:
        self.config, self.world, self.run_dir, self.trainer = config, world, run_dir, trainer
        self.device = devices.current(config.cluster.accelerator)
        replicas = world.role_comm.allgather(trainer.replica)
        self.members = [[rank for rank, r in enumerate(replicas) if r == replica] for replica in range(trainer.replicas)]

    def do(self, work: Work, batch: Sequences | None = None) -> Outcome:
        """Blocks until it is done. `batch` comes with a micro-batch."""
        outcome = Outcome(self.world.clock(), 0.0)
        match work.command:
            case BeginStep():
                self.trainer.begin_step()
            case TrainMicroBatch():
                assert batch is not None
                self.trainer.accumulate(micro_batches(batch, work.command.cuts))
            case FinishStep():
                outcome.stats = self.trainer.finish_step()
            case PublishWeights(version=version):
                outcome.published, outcome.nbytes = self._publish(version)
            case SaveCheckpoint(iteration=iteration, version=version):
                outcome.path = self._save(iteration, version, work.cursor)
            case StopTraining(reason=reason):
                if not reason:
                    require(self.run_dir)
                    self.trainer.export_hf(self.run_dir.hf)
        devices.synchronize(self.device)  # an accelerator returns before it is done
        outcome.ended_t = self.world.clock()
        return outcome

    def serve(self, mailbox: Mailbox, channel: Channel) -> str:
        """The loop of a rank that is not the coordinator; returns why training stopped."""
        queue: deque[Work] = deque()
        self.world.waits = lambda: [f"{len(queue)} pieces of work follow; else it waits for the next", *mailbox.states()]
        while True:
            for _, message in mailbox.poll():
                assert isinstance(message, Work)
                queue.append(message)
            if not queue:
                mailbox.check_silence(self.config.limits.message_s, lambda: "the training coordinator")
                time.sleep(POLL_S)
                continue
            work = queue.popleft()
            batch = unpack(channel.receive(work.nbytes, 0))[0] if work.nbytes else None
            outcome = self.do(work, batch)
            mailbox.worked()
            if isinstance(work.command, TrainMicroBatch) and self.reports(work.command.replica):
                assert batch is not None
                mailbox.send(self.world.training_coordinator, BatchDone(done_event(work.command, outcome, batch)))
            if isinstance(work.command, StopTraining):
                return work.command.reason

    def reports(self, replica: int) -> bool:
        """Whether this rank speaks for the replica."""
        return self.world.role_rank == self.members[replica][0]

    def _publish(self, version: Version) -> tuple[Published | None, int]:
        """Every weight, bucket by bucket in the one order. What came of it and the model's bytes, where the publisher is."""
        buckets = self.trainer.weight_buckets(self.config.channel.weight_bucket_bytes)
        if self.publisher is not None:
            return self.publisher.publish(version, buckets)
        for _ in buckets:  # its tensor-parallel peers
            pass
        return None, 0

    def _save(self, iteration: int, version: int, cursor: int) -> str:
        """Written under this attempt's own name, given its place while the run dir is still this attempt's."""
        if self.world.is_coordinator:
            checkpoints.begin(self.run_dir, iteration)
        path = checkpoints.part(self.run_dir, iteration)
        try:
            self.trainer.save(path, {"iteration": iteration, "version": version, "cursor": cursor})
        except checkpoints.NotWritten as error:
            last = next((kept.name for kept in self.run_dir.checkpoints_found()), "its beginning")
            raise checkpoints.NotWritten(f"{error}; started again, the run goes on from {last}") from None
        if self.world.is_coordinator:
            checkpoints.publish(self.run_dir, iteration, self.config.run.keep_checkpoints)
        return str(self.run_dir.checkpoint(iteration).relative_to(self.run_dir.path))


def micro_batches(batch: Sequences, cuts: tuple[int, ...]) -> list[Sequences]:
    """The micro-batches that TrainMicroBatch laid end to end."""
    if not cuts:
        return [batch]
    ends = list(accumulate(cuts))
    return [batch.select(range(end - count, end)) for count, end in zip(cuts, ends)]


def done_event(command: TrainMicroBatch, outcome: Outcome, batch: Sequences) -> MicroBatchDone:
    return MicroBatchDone(
        t=outcome.ended_t,
        replica=command.replica,
        micro_batch=command.micro_batch,
        started_t=outcome.started_t,
        ended_t=outcome.ended_t,
        trajectories=batch.count,
        tokens=batch.tokens,
    )

"""What does the training coordinator's rank do?

It runs `control.training.TrainingCoordinator` with a clock and IO, and is a training rank itself: messages, then events and
their commands, then at most one piece of its own work, then messages again. Groups are received between micro-batches and
stay here until their step is done.

    waits for                  unblocked by              bounded by
    the engines                EnginesUp                 limits.start_s
    a group                    GroupHeader, its tensor   limits.message_s
    a replica                  BatchDone                 limits.message_s
    who takes weights          Takers                    limits.message_s
    engines holding weights    Confirmed                 limits.message_s
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace

import msgspec
import numpy as np

from rpipe.config import Config
from rpipe.control.settings import training_settings
from rpipe.control.training import TrainingCoordinator
from rpipe.core.eventlog import EventLog
from rpipe.core.events import (
    BeginStep,
    CheckpointSaved,
    FinishStep,
    GroupArrived,
    GroupDropped,
    MicroBatchDone,
    PublishWeights,
    RolloutEnded,
    SaveCheckpoint,
    StepDone,
    StopRequested,
    StopTraining,
    TrainerReady,
    TrainingCommand,
    TrainingEvent,
    TrainMicroBatch,
    WeightsPublished,
)
from rpipe.core.types import GroupId, Sequences, Version
from rpipe.policy.advantage import whitened
from rpipe.runtime.channel import Channel, ChannelError, Sent, pack, unpack
from rpipe.runtime.mailbox import Mailbox
from rpipe.runtime.messages import (
    AnyMessage,
    BatchDone,
    Confirmed,
    Dropped,
    Ended,
    GroupHeader,
    Message,
    Offer,
    Ready,
    Received,
    StepReport,
    Stop,
    Takers,
    TrainerState,
    Work,
)
from rpipe.training.notice import Notice
from rpipe.training.worker import POLL_S, Outcome, TrainingWorker, done_event

ROLLOUT = 0  # the rollout coordinator: its rank in the world and in the channel group
STATE_EVERY_S = 0.2


class TrainingDriver:
    """`groups` brings trajectories from rollout, `batches` takes them on to the training ranks."""

    def __init__(
        self, config: Config, worker: TrainingWorker, log: EventLog, mailbox: Mailbox, groups: Channel, batches: Channel
    ) -> None:
        self.config, self.world = config, worker.world
        self.coordinator = TrainingCoordinator(training_settings(config))
        self._worker, self._log, self._mailbox, self._groups, self._batches = worker, log, mailbox, groups, batches
        self._inbox: deque[TrainingEvent] = deque()
        self._queue: deque[tuple[Work, Sequences | None]] = deque()  # this rank's own work
        self._held: dict[GroupId, Sequences] = {}
        self._sent: dict[int, list[Sent]] = {}  # micro-batch -> tensors on their way to its ranks
        self._publishing = (0.0, 0)  # since when, bytes
        self._takers: dict[Version, Takers] = {}
        self._cursors: dict[int, int] = {}  # iterations trained -> prompts drawn by then
        self._busy_s = [0.0] * config.replicas
        self._last_t = 0.0
        self._last_state: tuple[float, bool, str, int] = (0.0, False, "", 0)
        self._stop_seen = False
        self._at_work = ""
        self._notice = Notice(config.limits.notice_s)

    def run(self, iteration: int, cursor: int) -> str:
        """From the first publish to StopTraining; returns its reason. Raises OffPolicy, ChannelError, TimeoutError."""
        self._cursors[iteration] = cursor
        self.world.waits = self._waits
        now = self.world.clock()
        replicas, stages = self.config.replicas, self.config.training.pp
        self._inbox.append(TrainerReady(t=now, iteration=iteration, version=iteration, replicas=replicas, stages=stages))
        while True:
            for _, message in self._mailbox.poll():
                self._receive(message)
            if self.world.stop_reason and not self._stop_seen:
                self._stop_seen = True
                self._inbox.append(StopRequested(t=self.world.clock(), reason=self.world.stop_reason))
            while self._inbox:
                self._step(self._inbox.popleft())
            if self._queue:
                work, batch = self._queue.popleft()
                self._tell_state(busy=True)
                self._work(work, batch)
                if isinstance(work.command, StopTraining):
                    return work.command.reason
            else:
                self._tell_state(busy=False)
                self._mailbox.check_silence(
                    self.config.limits.message_s, lambda: self.coordinator.waiting_for() or "a replica's micro-batch"
                )
                time.sleep(POLL_S)

    def _step(self, event: TrainingEvent) -> None:
        self._last_t = max(event.t, self._last_t)
        event = msgspec.structs.replace(event, t=self._last_t)
        self._log.event(event)
        commands = self.coordinator.on(event)
        for command in commands:
            self._log.command(event.t, command)
        if commands:
            self._log.flush()
        for command in commands:
            self._perform(command)

    # ---- messages in

    def _receive(self, message: AnyMessage) -> None:
        now = self.world.clock()
        match message:
            case GroupHeader():
                self._inbox.append(self._receive_group(message))
            case BatchDone():
                self._batch_done(message.event)
            case Dropped():
                self._inbox.append(GroupDropped(t=now, group=message.group, order=message.order, iteration=message.iteration))
            case Ended():
                self._cursors = {**self._cursors, message.iteration + 1: message.cursor}
                self._inbox.append(
                    RolloutEnded(
                        t=now,
                        iteration=message.iteration,
                        version=message.version,
                        groups_sent=message.groups_sent,
                        groups_dropped=message.groups_dropped,
                    )
                )
            case Takers():
                self._takers[message.version] = message
            case Confirmed():
                started_t, nbytes = self._publishing
                self._notice.published(now)
                self._inbox.append(WeightsPublished(t=now, version=message.version, started_t=started_t, nbytes=nbytes))

    def _receive_group(self, header: GroupHeader) -> GroupArrived:
        if not self._groups.patient:
            self._send_now(Ready(header.group))
        sequences, spans = unpack(self._groups.receive(header.nbytes, ROLLOUT))
        if tuple(sequences.lengths.tolist()) != header.tokens or any(spans[:, 3] != header.version):
            raise ChannelError(f"group {header.group}: its tensors are not what its header says")
        self._held[header.group] = sequences
        self._mailbox.send(ROLLOUT, Received(header.group))
        return GroupArrived(
            t=self.world.clock(),
            group=header.group,
            order=header.order,
            iteration=header.iteration,
            version=header.version,
            tokens=header.tokens,
            nbytes=header.nbytes,
        )

    def _batch_done(self, event: MicroBatchDone) -> None:
        for sent in self._sent.pop(event.micro_batch, []):
            sent.wait()
        self._busy_s[event.replica] += event.ended_t - event.started_t
        self._inbox.append(event)

    # ---- commands out

    def _perform(self, command: TrainingCommand) -> None:
        match command:
            case TrainMicroBatch():
                self._dispatch(command)
            case SaveCheckpoint(iteration=iteration):
                self._everywhere(Work(command, cursor=self._cursors[iteration]))
            case BeginStep():
                if self.config.training.loss.advantage == "reinforce_pp":
                    self._whiten(self.coordinator.step_groups)
                self._everywhere(Work(command))
            case FinishStep() | PublishWeights() | StopTraining():
                self._everywhere(Work(command))

    def _whiten(self, groups: tuple[GroupId, ...]) -> None:
        """REINFORCE++: advantages, which came as rewards, over the step's trajectories (serial mode: all are here)."""
        held = [self._held[group] for group in groups]
        for group, one, advantages in zip(groups, held, whitened([one.advantages.tolist() for one in held])):
            self._held[group] = replace(one, advantages=np.array(advantages, np.float32))

    def _everywhere(self, work: Work) -> None:
        for rank in range(1, self.world.role_size):
            self._mailbox.send(self.world.training_coordinator + rank, work)
        self._queue.append((work, None))

    def _dispatch(self, command: TrainMicroBatch) -> None:
        """The chosen trajectories to every rank of the replica."""
        batch = Sequences.concatenate([self._held[s.group].select(s.samples) for s in command.slices])
        data = pack(batch)
        for rank in self._worker.members[command.replica]:
            if rank == self.world.role_rank:
                self._queue.append((Work(command), batch))
            else:
                bare = msgspec.structs.replace(command, slices=())
                self._mailbox.send(self.world.training_coordinator + rank, Work(bare, nbytes=len(data)))
                self._sent.setdefault(command.micro_batch, []).append(self._batches.send(data, rank))

    # ---- own work

    def _work(self, work: Work, batch: Sequences | None) -> None:
        # These two when their turn comes: engines that were told to stop would not join a broadcast still in the queue.
        if isinstance(work.command, PublishWeights):
            self._offer(work.command.version)
        elif isinstance(work.command, StopTraining) and work.command.reason:
            self._mailbox.send(ROLLOUT, Stop(work.command.reason))
        # MPI makes no progress while this rank computes: what was sent must be out before.
        self._mailbox.drain(self.config.limits.message_s)
        self._at_work = type(work.command).__name__
        outcome = self._worker.do(work, batch)
        self._at_work = ""
        self._mailbox.worked()
        match work.command:
            case TrainMicroBatch() as command:
                assert batch is not None
                if self._worker.reports(command.replica):
                    self._batch_done(done_event(command, outcome, batch))
            case FinishStep() as command:
                self._step_done(command, outcome)
            case PublishWeights():
                assert outcome.published is not None
                self._publishing = (outcome.started_t, outcome.nbytes)
                self._mailbox.send(ROLLOUT, outcome.published)
            case SaveCheckpoint(iteration=iteration):
                told = self._notice.saved(outcome.started_t, outcome.ended_t)
                if told:
                    print(told, flush=True)
                self._inbox.append(
                    CheckpointSaved(t=outcome.ended_t, iteration=iteration, started_t=outcome.started_t, path=outcome.path)
                )

    def _offer(self, version: Version) -> None:
        """Learn which engines live, and meet those that have no update group with the trainer yet."""
        publisher = self._worker.publisher
        assert publisher is not None
        self._mailbox.send(ROLLOUT, Offer(version))
        while version not in self._takers:
            for _, message in self._mailbox.poll():
                self._receive(message)
            self._mailbox.check_silence(self.config.limits.message_s, lambda: "the rollout side to name the living engines")
            time.sleep(POLL_S)
        takers = self._takers.pop(version).engines
        self._at_work = f"the update groups of engines {', '.join(str(engine) for engine, _ in takers)}"
        publisher.meet(takers, self._send_now)

    def _send_now(self, message: Message) -> None:
        self._mailbox.send(ROLLOUT, message)
        self._mailbox.drain(self.config.limits.message_s)

    def _step_done(self, command: FinishStep, outcome: Outcome) -> None:
        stats = outcome.stats
        assert stats is not None
        event = StepDone(
            t=outcome.ended_t,
            step=command.step,
            started_t=outcome.started_t,
            skipped=stats.skipped,
            loss=_finite(stats.loss),
            grad_norm=_finite(stats.grad_norm),
            learning_rate=stats.learning_rate,
            entropy=_finite(stats.entropy),
            clip_fraction=_finite(stats.clip_fraction),
            kl=_finite(stats.kl),
            logprob_gap_mean=_finite(stats.logprob_gap_mean),
            logprob_gap_max=_finite(stats.logprob_gap_max),
            trained_tokens=stats.trained_tokens,
        )
        self._inbox.append(event)
        busy_s = sum(self._busy_s) / len(self._busy_s) + outcome.ended_t - outcome.started_t
        self._busy_s = [0.0] * len(self._busy_s)
        self._mailbox.send(ROLLOUT, StepReport(command.iteration, event, len(command.groups), busy_s))
        for group in command.groups:
            del self._held[group]

    # ---- what a person and a stuck job need

    def _waits(self) -> list[str]:
        """For a person who looks at a job that hangs."""
        waits = self.coordinator.waiting_for()
        return [
            f"waits for {waits}" if waits else "at work, or waits for a replica's micro-batch",
            f"at work on: {self._at_work or 'nothing'}; {len(self._queue)} pieces of work follow",
            f"iteration {self.coordinator.iteration}, version {self.coordinator.version},"
            f" {self.coordinator.groups_consumed} groups consumed; held: {sorted(self._held)}",
            f"channel: micro-batches {sorted(self._sent)} on their way to replicas",
            *self._mailbox.states(),
        ]

    def _tell_state(self, busy: bool) -> None:
        """For the progress display; on a change, and not more often than it can be read."""
        text = "" if busy else self.coordinator.waiting_for()
        last_s, *last = self._last_state
        now, new = time.monotonic(), (busy, text, self.coordinator.groups_consumed)
        if tuple(last) != new and now - last_s > STATE_EVERY_S:
            self._last_state = (now, *new)
            self._mailbox.send(ROLLOUT, TrainerState(*new))


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None

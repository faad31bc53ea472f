"""Who performs what the training coordinator commands? Models of what training/driver.py and training/worker.py do.

A command that this file does not know is an error of mypy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from typing_extensions import assert_never

from rpipe.control.settings import training_settings
from rpipe.control.training import TrainingCoordinator
from rpipe.core import events as e
from rpipe.core.types import GroupId
from rpipe.sim.costs import call_s, cut, publish_s, trainer_costs
from rpipe.sim.driver import Log, drive
from rpipe.sim.trainer import CoordinatorRank, Replica, Work

if TYPE_CHECKING:
    from rpipe.sim.job import SimulatedJob


class TrainingSide:
    """The training ranks: the training coordinator, and what it commands."""

    def __init__(self, job: SimulatedJob, log: Log) -> None:
        config, shared = job.config, job.hardware.host
        self.job, self.log, self.kernel = job, log, job.kernel
        self.coordinator = TrainingCoordinator(training_settings(config))
        self.costs = trainer_costs(config)
        ranks = config.cluster.training_ranks
        cores = shared.trainer_cores if shared else 1.0
        self._all_cores = cores * ranks
        one = cores * ranks / config.replicas
        self.rank = CoordinatorRank(self.kernel, job.host, one)
        self.others = [Replica(self.kernel, job.host, one) for _ in range(1, config.replicas)]
        self.tokens: dict[GroupId, tuple[tuple[int, ...], int]] = {}  # of a group's trajectories; and those to train
        self._publish_s = publish_s(config, config.engines)
        self._publishing_t = 0.0
        self._busy_s = 0.0  # of the step's micro-batches, over all replicas

    def start(self) -> None:
        replicas, stages = self.job.config.replicas, self.job.config.training.pp
        ready = e.TrainerReady(t=self.kernel.now, iteration=0, version=0, replicas=replicas, stages=stages)
        self.rank.receive(lambda: self.on(ready))

    def on(self, event: e.TrainingEvent) -> None:
        drive(self.coordinator, self.log, event, self._perform)

    def published(self, version: int) -> None:
        nbytes = 0
        self.on(e.WeightsPublished(t=self.kernel.now, version=version, started_t=self._publishing_t, nbytes=nbytes))

    def _perform(self, command: e.TrainingCommand) -> None:
        job, kernel = self.job, self.kernel
        match command:
            case e.TrainMicroBatch():
                self._train(command)
            case e.FinishStep():
                self.rank.queue(Work(self.costs.step_s(), lambda began: self._step_done(command, began), self._all_cores))
            case e.PublishWeights(version=version):
                seconds = self._publish_s + 2 * job.hardware.message_s
                self.rank.queue(Work(seconds, lambda began: None, self._all_cores, lambda: self._offer(version)))
            case e.SaveCheckpoint(iteration=iteration):
                seconds = job.hardware.checkpoint_s
                self.rank.queue(Work(seconds, lambda began: self._saved(iteration, began), self._all_cores))
            case e.StopTraining(reason=reason):
                if reason:
                    job.to_rollout(lambda: job.rollout.on(e.StopRequested(t=kernel.now, reason=reason)))
                kernel.stopped = job.rollout.coordinator.done
            case e.BeginStep():
                pass
            case _:
                assert_never(command)

    def _offer(self, version: int) -> None:
        self._publishing_t = self.kernel.now
        self.job.to_rollout(lambda: self.job.rollout.on(e.WeightsOffered(t=self.kernel.now, version=version)))

    def _train(self, command: e.TrainMicroBatch) -> None:
        lengths = [self.tokens[s.group][0][sample] for s in command.slices for sample in s.samples]
        seconds = call_s(self.costs, cut(lengths, command.cuts))

        def done(began: float) -> e.MicroBatchDone:
            self._busy_s += self.kernel.now - began
            return e.MicroBatchDone(
                t=self.kernel.now,
                replica=command.replica,
                micro_batch=command.micro_batch,
                started_t=began,
                ended_t=self.kernel.now,
                trajectories=len(lengths),
                tokens=command.tokens,
            )

        if command.replica == 0:
            self.rank.queue(Work(seconds, lambda began: self.on(done(began))))
            return
        worker = self.others[command.replica - 1]

        def answer(began: float) -> None:
            event = done(began)
            self.job.to_training(lambda: self.on(msgspec.structs.replace(event, t=self.kernel.now)))

        self.kernel.after(self.job.hardware.message_s, lambda: worker.give(Work(seconds, answer)))

    def _step_done(self, command: e.FinishStep, began: float) -> None:
        trained = 0
        for group in command.groups:
            trained += self.tokens.pop(group)[1]
        trained_by = e.StepTrained(
            t=self.kernel.now,
            iteration=command.iteration,
            step=command.step,
            groups=len(command.groups),
            busy_s=self._busy_s / self.job.config.replicas + self.kernel.now - began,
        )
        self._busy_s = 0.0
        self.job.to_rollout(lambda: self.job.rollout.on(msgspec.structs.replace(trained_by, t=self.kernel.now)))
        self.on(
            e.StepDone(
                t=self.kernel.now,
                step=command.step,
                started_t=began,
                skipped=False,
                loss=None,
                grad_norm=None,
                learning_rate=self.job.config.training.optimizer.learning_rate,
                entropy=None,
                clip_fraction=None,
                kl=None,
                logprob_gap_mean=None,
                logprob_gap_max=None,
                trained_tokens=trained,
            )
        )

    def _saved(self, iteration: int, began: float) -> None:
        self.on(e.CheckpointSaved(t=self.kernel.now, iteration=iteration, started_t=began, path=""))

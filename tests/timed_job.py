"""A job on a virtual clock: both real coordinators, and a world whose engines, rewards, trainer and channel take stated times.

Writes the event log that a real job would, so that what reads logs is tested on what the coordinators really decide.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rpipe.control.rollout import RolloutCoordinator
from rpipe.control.training import TrainingCoordinator
from rpipe.core import events as e
from rpipe.core.eventlog import EventLog
from rpipe.core.types import TrajectoryId
from tests.pure_job import rollout_settings, step_done, training_settings

EVAL_GROUPS = 3


@dataclass
class TimedJob:
    """Ids of groups count over the run: iteration i has groups i x groups ... Engines take any number of turns at once."""

    directory: Path  # an attempt's: its events/ are written
    groups: int = 8  # R
    samples: int = 4  # K
    rollout: dict[str, Any] = field(default_factory=dict)  # changes of RolloutSettings
    training: dict[str, Any] = field(default_factory=dict)  # changes of TrainingSettings
    token_s: Callable[[int], float] = lambda engine: 0.01
    tokens: Callable[[TrajectoryId], int] = lambda t: 90 + (7 * t.group + 11 * t.sample) % 20
    reward_s: Callable[[TrajectoryId], float] = lambda t: 0.01
    reward: Callable[[TrajectoryId], float] = lambda t: float(t.sample % 2)
    train_token_s: float = 0.0005
    step_s: float = 0.05
    update_s: Callable[[int], float] = lambda engine: 0.02
    first_token_s: float = 0.02
    channel_s: float = 0.002
    starts_at: tuple[int, int] = (0, 0)  # iteration and version of the checkpoint that it goes on from
    ends_at_s: float = float("inf")  # killed then
    loses: tuple[tuple[float, int], ...] = ()  # (when, which engine)
    restart_s: float = 1.0
    slow_turns: dict[TrajectoryId, float] = field(default_factory=dict)  # that take so many times their time
    kept: dict[int, tuple[int, ...]] = field(default_factory=dict)  # groups an earlier attempt finished -> their tokens
    unix_s: float | None = None  # wall clock at t = 0

    def __post_init__(self) -> None:
        iterations = {"iterations": self.rollout.get("iterations", self.training.get("iterations", 3))}
        self._rollout = RolloutCoordinator(rollout_settings(**{**iterations, **self.rollout}))
        self._training = TrainingCoordinator(training_settings(**{"micro_batch_tokens": 4000, **iterations, **self.training}))
        self._heap: list[tuple[float, int, EventLog, Any, Any]] = []
        self._order = 0
        self._now = 0.0
        self._replica_free = [0.0] * self._training.settings.replicas
        self._offered_t = 0.0

    def run(self) -> Path:
        """The directory. Raises AssertionError where the coordinators wedge."""
        directory = self.directory / "events"
        first_training = 1
        with EventLog(directory, 0) as rollout, EventLog(directory, first_training) as training:
            self._rollout_log, self._training_log = rollout, training
            wall = {} if self.unix_s is None else {"unix_s": self.unix_s}
            for log, role in ((rollout, "rollout"), (training, "training")):
                log.note(0.0, "JobStarted", role=role, host="virtual", attempt=1, pid=1, **wall)
            iteration, version = self.starts_at
            ready = e.TrainerReady(t=1.0, iteration=iteration, version=version, replicas=len(self._replica_free))
            self._later(1.0, training, self._training, ready)
            for lost_t, engine in self.loses:
                self._later(lost_t, rollout, self._rollout, e.EngineLost(t=lost_t, engine=engine, reason="silent for 30 s"))
            while self._heap:
                self._now, _, log, coordinator, event = heapq.heappop(self._heap)
                if self._now > self.ends_at_s:
                    return self.directory
                if isinstance(event, e.EngineLost):
                    event = self._lose(event)
                log.event(event)
                for command in coordinator.on(event):
                    log.command(self._now, command)
                    self._perform(command)
            assert self._rollout.done and self._training.done, (self._rollout.waiting_for(), self._training.waiting_for())
            for log in (rollout, training):
                log.note(self._now, "JobEnded", reason="")
        return self.directory

    def _later(self, t: float, log: EventLog, coordinator: Any, event: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (t, self._order, log, coordinator, event))

    def _to_rollout(self, event: Any) -> None:
        self._later(event.t, self._rollout_log, self._rollout, event)

    def _to_training(self, event: Any) -> None:
        self._later(event.t, self._training_log, self._training, event)

    def _perform(self, c: Any) -> None:
        t = self._now
        match c:
            case e.PublishWeights():
                self._offered_t = t
                self._to_rollout(e.WeightsOffered(t=t, version=c.version))
            case e.UpdateEngine():
                took = self.update_s(c.engine)
                self._to_rollout(e.EngineUpdated(t=t + took, engine=c.engine, version=c.version, started_t=t))
            case e.ConfirmWeights():
                self._to_training(e.WeightsPublished(t=t, version=c.version, started_t=self._offered_t, nbytes=1 << 20))
            case e.RequestRollout():
                self._request(c)
            case e.RequestGroups():
                specs = tuple(self._spec(self._next_group + i) for i in range(c.count))
                self._next_group += c.count
                self._to_rollout(e.GroupsDrawn(t=t, iteration=c.iteration, groups=specs))
            case e.SendTurn():
                self._turn(c)
            case e.RestartEngine():
                back = e.EngineRestarted(t=t + self.restart_s, engine=c.engine, version=c.version, started_t=t)
                self._to_rollout(back)
            case e.ScoreTrajectory():
                took = self.reward_s(c.trajectory)
                scored = e.TrajectoryScored(
                    t=t + took, trajectory=c.trajectory, reward=self.reward(c.trajectory), started_t=t + took / 10
                )
                self._to_rollout(scored)
            case e.SendGroup():
                tokens = tuple(4 + self.tokens(TrajectoryId(c.group, s)) for s in range(self.samples))
                about = {"group": c.group, "order": c.order, "iteration": c.iteration, "version": c.version}
                self._to_training(e.GroupArrived(t=t + self.channel_s, tokens=tokens, nbytes=9 * sum(tokens), **about))
                self._to_rollout(e.GroupReceived(t=t + self.channel_s, group=c.group))
            case e.DropGroup():
                self._to_training(e.GroupDropped(t=t + self.channel_s, group=c.group, order=c.order, iteration=c.iteration))
            case e.EndRollout():
                counts = {"groups_sent": c.groups_sent, "groups_dropped": c.groups_dropped}
                self._to_training(e.RolloutEnded(t=t + self.channel_s, iteration=c.iteration, version=c.version, **counts))
            case e.TrainMicroBatch():
                started = max(t, self._replica_free[c.replica])
                ended = self._replica_free[c.replica] = started + c.tokens * self.train_token_s
                self._to_training(
                    e.MicroBatchDone(
                        t=ended, replica=c.replica, micro_batch=c.micro_batch, started_t=started, ended_t=ended,
                        trajectories=sum(len(s.samples) for s in c.slices), tokens=c.tokens,
                    )
                )  # fmt: skip
            case e.FinishStep():
                done = step_done(t + self.step_s, c.step)
                self._to_training(msgspec.structs.replace(done, started_t=t))
            case e.SaveCheckpoint():
                self._to_training(e.CheckpointSaved(t=t + 0.1, iteration=c.iteration, started_t=t, path=""))
            case e.StopTraining() if c.reason:
                self._to_rollout(e.StopRequested(t=t, reason=c.reason))
            case _:
                pass

    def _request(self, c: e.RequestRollout) -> None:
        settings = self._rollout.settings
        most = self.groups + settings.over_sampling_groups + settings.refill_groups
        first, count, samples = c.iteration * most, self.groups + settings.over_sampling_groups, self.samples
        self._next_group = first + count
        if c.purpose == "eval":
            first, count, samples = -EVAL_GROUPS, EVAL_GROUPS, 1
        specs = tuple(self._spec(group) for group in range(first, first + count))
        about = {"iteration": c.iteration, "version": c.version, "purpose": c.purpose}
        self._to_rollout(e.RolloutRequested(t=self._now, trajectories_per_group=samples, groups=specs, **about))

    def _spec(self, group: int) -> e.GroupSpec:
        kept = self.kept.get(group, ())
        return e.GroupSpec(group, 4, kept, tuple(self.reward(TrajectoryId(group, s)) for s in range(len(kept))))

    def _lose(self, event: e.EngineLost) -> e.EngineLost:
        """Its turns end; what they had made so far is said."""
        prefixes: list[e.Prefix] = []
        gone = []
        for item in self._heap:
            turn = item[4]
            if isinstance(turn, e.TurnStarted | e.TurnFinished) and turn.engine == event.engine:
                gone.append(item)
            if isinstance(turn, e.TurnFinished) and turn.engine == event.engine and event.t > turn.first_token_t:
                pace = self.token_s(event.engine)
                left = math.ceil((turn.t - event.t) / pace - 1e-9)
                prefixes.append(e.Prefix(turn.trajectory, turn.output_tokens - left))
        self._heap = [item for item in self._heap if item not in gone]
        heapq.heapify(self._heap)
        return msgspec.structs.replace(event, prefixes=tuple(prefixes))

    def _turn(self, c: e.SendTurn) -> None:
        t, tokens = self._now, self.tokens(c.trajectory)
        first = t + self.first_token_s
        took = (tokens - c.prefix_tokens) * self.token_s(c.engine) * self.slow_turns.get(c.trajectory, 1.0)
        self._to_rollout(e.TurnStarted(t=first, trajectory=c.trajectory, engine=c.engine))
        self._to_rollout(
            e.TurnFinished(
                t=first + took, trajectory=c.trajectory, engine=c.engine, output_tokens=tokens,
                cached_tokens=0, finish="stop", started_t=t, first_token_t=first, version=c.version,
            )
        )  # fmt: skip

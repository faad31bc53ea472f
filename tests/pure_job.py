"""A job without IO: both coordinators, and a world that delivers what may be delivered next in any order it likes.

What is ordered in the real job is ordered here: messages between the coordinators (each way), and one replica's
micro-batches. Everything else (turns, rewards, receipts) is delivered in the order that `choose` picks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from rpipe.control.rollout import RolloutCoordinator
from rpipe.control.rollout_settings import RolloutSettings
from rpipe.control.training import TrainingCoordinator, TrainingSettings
from rpipe.core import events as e
from rpipe.core.types import TrajectoryId
from rpipe.policy.admission import Admission, Frontier
from rpipe.policy.advantage import grpo
from rpipe.policy.placement import LeastLoaded


def rollout_settings(**changes: Any) -> RolloutSettings:
    base: dict[str, Any] = {
        "engines": 2, "iterations": 2, "max_new_tokens": 64, "trajectory_deadline_s": 1e9, "queue_bytes": 1 << 30,
        "admission": Frontier(2), "placement": LeastLoaded(), "advantage": grpo,
    }  # fmt: skip
    return RolloutSettings(**{**base, **changes})


def training_settings(**changes: Any) -> TrainingSettings:
    base: dict[str, Any] = {
        "mode": "fifo", "span_groups": False, "groups_per_step": 2, "replicas": 2, "micro_batch_tokens": 100, "iterations": 2,
    }  # fmt: skip
    return TrainingSettings(**{**base, **changes})


@dataclass
class PureJob:
    rollout_settings: RolloutSettings
    training_settings: TrainingSettings
    groups: int  # R
    samples: int  # K
    choose: Callable[[int], int]  # n -> 0 .. n-1
    reward: Callable[[TrajectoryId], float] = lambda t: float(t.sample % 2)
    lose: Callable[[int], int | None] = lambda step: None  # an engine to be lost before this event
    busy_s: float = 1.0  # of one step
    length: Callable[[TrajectoryId], int] = lambda t: 5 + (7 * t.group + 3 * t.sample) % 30
    turns: Callable[[TrajectoryId], int] = lambda t: 1  # that it takes, if nothing ends it before
    answer_tokens: int = 3  # of the environment
    keeps: Callable[[int], bool] = lambda group: True  # the filter function, where one is set
    rollout_history: list[tuple[e.RolloutEvent, list[e.RolloutCommand]]] = field(default_factory=list)
    training_history: list[tuple[e.TrainingEvent, list[e.TrainingCommand]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rollout = RolloutCoordinator(self.rollout_settings)
        self.training = TrainingCoordinator(self.training_settings)
        self._now = 0.0
        self._next_group = 0
        self.drawn: Counter[int] = Counter()  # iteration -> groups
        self._to_rollout: deque[e.RolloutEvent] = deque()
        self._to_training: deque[e.TrainingEvent] = deque()
        self._replicas: list[deque[e.TrainingEvent]] = [deque() for _ in range(self.training_settings.replicas)]
        self._loose: list[e.RolloutEvent] = []
        self._turns: dict[TrajectoryId, e.SendTurn] = {}
        self.kept: dict[int, e.GroupSpec] = {}  # groups that an interrupted attempt finished
        self._rewards: dict[int, list[int]] = {}

    def run(self, limit: int = 100_000) -> PureJob:
        self._train(e.TrainerReady(t=0.0, iteration=0, version=0, replicas=self.training_settings.replicas))
        for step in range(limit):
            lost = self.lose(step)
            if lost is not None and not self.rollout.done:
                self._lose(lost)
            ready = [q for q in (self._to_rollout, self._to_training, *self._replicas) if q]
            options = len(ready) + len(self._loose)
            if not options:
                return self
            self._now += 1.0
            pick = self.choose(options)
            if pick < len(ready):
                queue = ready[pick]
                event = queue.popleft()
                (self._roll if queue is self._to_rollout else self._train)(event)  # type: ignore[arg-type]
            else:
                self._roll(self._loose.pop(pick - len(ready)))
        raise AssertionError(f"no end after {limit} events: {self.rollout.waiting_for()}; {self.training.waiting_for()}")

    def _lose(self, engine: int) -> None:
        """Nothing that the engine had not said by now is said any more; what it had made of a response, it had streamed."""
        prefixes = []
        for event in [x for x in self._loose if getattr(x, "engine", None) == engine]:
            self._loose.remove(event)
            if isinstance(event, e.TurnFinished):
                turn = self._turns[event.trajectory]
                made = self.choose(self.length(event.trajectory) - turn.prefix_tokens)
                prefixes.append(e.Prefix(event.trajectory, made))
        self._roll(e.EngineLost(t=self._now, engine=engine, reason="killed", prefixes=tuple(prefixes)))

    def _roll(self, event: e.RolloutEvent) -> None:
        commands = self.rollout.on(event)
        if isinstance(event, e.TurnStarted):
            self._loose.append(self.finished(self._turns[event.trajectory], "stop"))
        self.rollout_history.append((event, commands))
        for command in commands:
            self._perform_rollout(command)

    def _train(self, event: e.TrainingEvent) -> None:
        commands = self.training.on(event)
        self.training_history.append((event, commands))
        for command in commands:
            self._perform_training(command)

    def _perform_rollout(self, c: e.RolloutCommand) -> None:
        t = self._now
        match c:
            case e.UpdateEngine():
                self._loose.append(e.EngineUpdated(t=t, engine=c.engine, version=c.version, started_t=t))
            case e.ConfirmWeights():
                self._to_training.append(e.WeightsPublished(t=t, version=c.version, started_t=t, nbytes=1))
            case e.RequestRollout():
                self._next_group = c.iteration * self.most_groups
                if c.purpose == "train":
                    specs, samples = self._specs(self.groups + self.rollout_settings.over_sampling_groups), self.samples
                else:
                    specs, samples = tuple(e.GroupSpec(group, 4) for group in (-3, -2, -1)), 1
                self._to_rollout.append(
                    e.RolloutRequested(
                        t=t,
                        iteration=c.iteration,
                        version=c.version,
                        purpose=c.purpose,
                        trajectories_per_group=samples,
                        groups=specs,
                    )
                )
            case e.RequestGroups():
                self._to_rollout.append(e.GroupsDrawn(t=t, iteration=c.iteration, groups=self._specs(c.count)))
            case e.FilterGroup():
                self._loose.append(e.GroupFiltered(t=t, group=c.group, keep=self.keeps(c.group), started_t=t))
            case e.SendTurn():
                self._turns[c.trajectory] = c
                self._loose.append(e.TurnStarted(t=t, trajectory=c.trajectory, engine=c.engine))
            case e.RestartEngine():
                self._loose.append(e.EngineRestarted(t=t, engine=c.engine, version=c.version, started_t=t))
            case e.AbortTurn():
                turns = (e.TurnStarted, e.TurnFinished)
                index = next(i for i, x in enumerate(self._loose) if isinstance(x, turns) and x.trajectory == c.trajectory)
                del self._loose[index]
                turn = e.SendTurn(trajectory=c.trajectory, engine=c.engine, priority=0, version=self.rollout.version)
                self._loose.append(self.finished(turn, "abort"))
            case e.RunTool():
                done = c.turn + 1 >= self.turns(c.trajectory)
                tokens = 0 if done else self.answer_tokens
                self._loose.append(
                    e.ToolFinished(t=t, trajectory=c.trajectory, turn=c.turn, observation_tokens=tokens, done=done, started_t=t)
                )
            case e.ScoreTrajectory():
                self._loose.append(
                    e.TrajectoryScored(t=t, trajectory=c.trajectory, reward=self.reward(c.trajectory), started_t=t)
                )
            case e.SendGroup():
                tokens = tuple(4 + record.output_tokens for record in self.rollout.groups[c.group].trajectories)
                self._to_training.append(
                    e.GroupArrived(
                        t=t, group=c.group, order=c.order, iteration=c.iteration, version=c.version, tokens=tokens, nbytes=1
                    )
                )
                self._loose.append(e.GroupReceived(t=t, group=c.group))
            case e.DropGroup():
                self._to_training.append(e.GroupDropped(t=t, group=c.group, order=c.order, iteration=c.iteration))
            case e.EndRollout():
                self._to_training.append(
                    e.RolloutEnded(
                        t=t,
                        iteration=c.iteration,
                        version=c.version,
                        groups_sent=c.groups_sent,
                        groups_dropped=c.groups_dropped,
                    )
                )
            case _:
                pass

    @property
    def most_groups(self) -> int:
        return self.groups + self.rollout_settings.over_sampling_groups + self.rollout_settings.refill_groups

    def _specs(self, count: int) -> tuple[e.GroupSpec, ...]:
        first = self._next_group
        self._next_group += count
        self.drawn[first // self.most_groups] += count
        return tuple(self.kept.get(first + i, e.GroupSpec(first + i, 4)) for i in range(count))

    def finished(self, c: e.SendTurn, finish: Any) -> e.TurnFinished:
        return e.TurnFinished(
            t=self._now, trajectory=c.trajectory, engine=c.engine, output_tokens=self.length(c.trajectory), cached_tokens=0,
            finish=finish, started_t=0.0, first_token_t=0.0, version=c.version,
        )  # fmt: skip

    def _perform_training(self, c: e.TrainingCommand) -> None:
        t = self._now
        match c:
            case e.PublishWeights():
                self._to_rollout.append(e.WeightsOffered(t=t, version=c.version))
            case e.TrainMicroBatch():
                done = e.MicroBatchDone(
                    t=t, replica=c.replica, micro_batch=c.micro_batch, started_t=t, ended_t=t,
                    trajectories=sum(len(s.samples) for s in c.slices), tokens=c.tokens,
                )  # fmt: skip
                self._replicas[c.replica].append(done)
            case e.FinishStep():
                self._to_training.append(step_done(t, c.step))
                trained = e.StepTrained(t=t, iteration=c.iteration, step=c.step, groups=len(c.groups), busy_s=self.busy_s)
                self._to_rollout.append(trained)
            case e.SaveCheckpoint():
                self._to_training.append(e.CheckpointSaved(t=t, iteration=c.iteration, started_t=t, path=""))
            case e.StopTraining() if c.reason:
                self._to_rollout.append(e.StopRequested(t=t, reason=c.reason))
            case _:
                pass

    # ---- what was commanded

    def rollout_commands(self, kind: type[Any]) -> list[Any]:
        return [c for _, commands in self.rollout_history for c in commands if isinstance(c, kind)]

    def training_commands(self, kind: type[Any]) -> list[Any]:
        return [c for _, commands in self.training_history for c in commands if isinstance(c, kind)]

    def accumulation(self) -> list[list[Any]]:
        """What each replica did, in order: micro-batches by content, and steps."""
        done: list[list[Any]] = [[] for _ in range(self.training_settings.replicas)]
        for _, commands in self.training_history:
            for c in commands:
                if isinstance(c, e.TrainMicroBatch):
                    items = [(s.group, sample) for s in c.slices for sample in s.samples]
                    cuts = c.cuts or (len(items),)
                    done[c.replica] += [(c.step, tuple(items[end - n : end])) for n, end in zip(cuts, accumulate(cuts))]
                elif isinstance(c, e.FinishStep):
                    for replica in done:
                        replica.append(("step", c.step, tuple(sorted(c.groups))))
        return done


def step_done(t: float, step: int, skipped: bool = False) -> e.StepDone:
    return e.StepDone(
        t=t, step=step, started_t=t, skipped=skipped, loss=0.0, grad_norm=1.0, learning_rate=1e-3, entropy=1.0,
        clip_fraction=0.0, kl=0.0, logprob_gap_mean=0.0, logprob_gap_max=0.0, trained_tokens=1,
    )  # fmt: skip


def admission(width: int | None) -> Admission:
    from rpipe.policy.admission import Fifo

    return Fifo() if width is None else Frontier(width)

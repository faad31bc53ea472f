"""What does the rollout coordinator's rank do?

It runs `control.rollout.RolloutCoordinator` with a clock and IO: events in, commands out, each to the log, each command
performed by one method below. Payloads (tokens, log-probs) stay here, under their group, until the trainer holds them.

    waits for               unblocked by                   bounded by
    engines to start        EngineUp of each               engine.start_deadline_s
    the trainer's weights   Offer, then WeightsLoaded      limits.message_s
    a turn                  TurnDone                       rollout.trajectory_deadline_s, engine.stall_deadline_s
    a reward                the reward pool                reward.deadline_s
    a group's delivery      Received                       limits.message_s
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rpipe.config import Config
from rpipe.control.rollout import OffPolicy, RolloutCoordinator
from rpipe.control.settings import rollout_settings
from rpipe.core.eventlog import EventLog
from rpipe.core.events import (
    AbortTurn,
    ConfirmWeights,
    DeadlinePassed,
    DropGroup,
    EndEvaluation,
    EndRollout,
    EngineReady,
    FilterGroup,
    FinishRun,
    GroupFiltered,
    GroupReceived,
    GroupsDrawn,
    GroupSpec,
    RequestGroups,
    RequestRollout,
    RolloutCommand,
    RolloutEvent,
    RolloutRequested,
    ScoreTrajectory,
    SendGroup,
    SendTurn,
    ServingComplete,
    StepTrained,
    StopRequested,
    TrajectoryScored,
    UpdateEngine,
    WeightsOffered,
)
from rpipe.core.types import GroupId, Prompt, Trajectory, TrajectoryId, VersionSpan
from rpipe.rollout.held import HeldGroup, RolloutData
from rpipe.rollout.rewards import RewardPool
from rpipe.rollout.watch import Watch
from rpipe.rollout.worker import EngineOwner
from rpipe.runtime.channel import Channel, Sent
from rpipe.runtime.dump import TrajectoryDump
from rpipe.runtime.mailbox import Mailbox
from rpipe.runtime.messages import (
    AnyMessage,
    CancelTurn,
    CloseEngine,
    Confirmed,
    Dropped,
    Ended,
    EngineFailed,
    EnginesUp,
    EngineUp,
    GroupHeader,
    Join,
    LoadWeights,
    Message,
    Offer,
    Ready,
    Received,
    Rendezvous,
    StartTurn,
    StepReport,
    Stop,
    TrainerState,
    TurnBegan,
    TurnDone,
    WeightsLoaded,
)
from rpipe.runtime.world import World

POLL_S = 0.002
CHANNEL_TRAINER = 1  # the training coordinator's rank in the two-member channel group


class RolloutError(RuntimeError):
    """The rollout cannot go on; one line says why."""


class RolloutDriver:
    """`run` is the whole rollout role; see the module's table of waits."""

    def __init__(
        self,
        config: Config,
        world: World,
        log: EventLog,
        mailbox: Mailbox,
        channel: Channel,
        data: RolloutData,
        dump: TrajectoryDump,
        watch: Watch,
        rewards_log: Path,
    ) -> None:
        self.config = config
        self.coordinator = RolloutCoordinator(rollout_settings(config))
        self._world, self._log, self._mailbox, self._channel = world, log, mailbox, channel
        self._data, self._dump, self._watch = data, dump, watch
        self._owner: EngineOwner | None = None
        self._rewards = RewardPool(config.reward, config.run.seed, log_path=rewards_log)
        self._inbox: deque[RolloutEvent] = deque()
        self._held: dict[GroupId, HeldGroup] = {}
        self._waiting: dict[GroupId, NDArray[np.uint8]] = {}  # packed groups that the trainer is not ready for
        self._sent: dict[GroupId, Sent] = {}
        self._weights_came = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._engines_up: set[int] = set()
        self._cursor = 0
        self._first_order = 0  # of the groups that the running rollout draws next
        self._failure: BaseException | None = None
        self._last_t = 0.0
        self.reason = ""

    # ---- the loop

    async def run(self, owner: EngineOwner) -> str:
        """Until FinishRun; returns its reason. Raises RolloutError, OffPolicy, TimeoutError."""
        self._owner = owner
        owner.reply = self.receive
        try:
            functions = dict(self._data.reward_functions)
            if self.config.filter_function:
                functions[self.config.filter_function] = "rollout.filter"
            await self._rewards.start(functions)  # a mistyped name ends the job before an engine starts
            owner.start()
            while not self.coordinator.done:
                self._turn_crank()
                await asyncio.sleep(0 if self._inbox else POLL_S)
            if not self.reason:
                self._watch.finish(self.coordinator, self._world.clock())
            return self.reason
        finally:
            for task in self._tasks:
                task.cancel()
            for rank in range(1, self.config.cluster.rollout_ranks):  # owners and the siblings that only wait
                self._mailbox.send(rank, CloseEngine())
            await self._owner.close()
            await self._rewards.close()
            self._dump.close()
            with contextlib.suppress(TimeoutError):  # a peer that is gone takes nothing; why it went is the error to show
                self._mailbox.drain(self.config.limits.stop_s)

    def _turn_crank(self) -> None:
        for _, message in self._mailbox.poll():
            self.receive(message)
        if self._failure is not None:
            raise self._failure
        deadline_t, now = self.coordinator.next_deadline_t, self._world.clock()
        if deadline_t is not None and deadline_t <= now:
            self._inbox.append(DeadlinePassed(t=now))
        while self._inbox and not self.coordinator.done:
            self._step(self._inbox.popleft())
        self._watch.show(self.coordinator, now)
        limits = self.config.limits
        # The trainer warms up and loads checkpoints before it listens.
        self._mailbox.check_silence(limits.message_s if self._weights_came else limits.start_s, self._waiting_for)

    def _step(self, event: RolloutEvent) -> None:
        # Owners stamp events with their own clock: the log must not run backwards.
        self._last_t = max(event.t, self._last_t)
        event = msgspec.structs.replace(event, t=self._last_t)
        self._log.event(event)
        for command in self.coordinator.on(event):
            self._log.command(event.t, command)
            self._watch.saw(event.t, command)
            self._perform(command)
        self._watch.saw(event.t, event)

    def _waiting_for(self) -> str:
        if len(self._engines_up) < self.config.engines:
            return f"engines {sorted(set(range(self.config.engines)) - self._engines_up)} to start"
        return self.coordinator.waiting_for()

    def _begin(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    # ---- messages in

    def receive(self, message: AnyMessage | Message) -> None:
        """From an engine owner (directly or over MPI) or from the trainer."""
        now = self._world.clock()
        match message:
            case TurnDone():
                self._store(message)
                self._inbox.append(message.event)
            case TurnBegan() | WeightsLoaded():
                self._inbox.append(message.event)
            case Ready():
                self._sent[message.group] = self._channel.send(self._waiting.pop(message.group), CHANNEL_TRAINER)
            case Received():
                self._sent.pop(message.group).wait()
                self._held.pop(message.group)
                self._inbox.append(GroupReceived(t=now, group=message.group))
            case TrainerState():
                self._watch.trainer(message)
            case StepReport():
                self._watch.step(message)
                self._inbox.append(
                    StepTrained(
                        t=now,
                        iteration=message.iteration,
                        step=message.event.step,
                        groups=message.groups,
                        busy_s=message.busy_s,
                    )
                )
            case Offer():
                self._weights_came = True
                self._inbox.append(WeightsOffered(t=now, version=message.version))
            case EngineUp():
                self._engine_up(message)
            case Rendezvous():
                self._cursor = message.cursor
                if message.iteration:
                    self._watch.say(self._going_on(message.iteration))
                for engine in range(self.config.engines):
                    self._to_engine(engine, message.join)
            case EngineFailed():
                self._failure = RolloutError(message.reason)
            case Stop():
                self._inbox.append(StopRequested(t=now, reason=message.reason))

    def _engine_up(self, message: EngineUp) -> None:
        self._engines_up.add(message.engine)
        self._watch.say(f"engine {message.engine} is up after {message.seconds:.0f} s")
        self._log.note(self._world.clock(), "EngineUp", engine=message.engine, seconds=round(message.seconds, 3))
        self._inbox.append(EngineReady(t=self._world.clock(), engine=message.engine, kv_tokens=message.kv_tokens))
        if len(self._engines_up) == self.config.engines:
            self._to_trainer(EnginesUp())

    def _going_on(self, iteration: int) -> str:
        if iteration >= self.config.run.iterations:
            return (
                f"nothing to train: the checkpoint holds {iteration} iterations, run.iterations is {self.config.run.iterations}"
            )
        return f"going on from the checkpoint after {iteration} iterations"

    def _store(self, done: TurnDone) -> None:
        event, held = done.event, self._held[done.event.trajectory.group]
        versions = {version for _, _, version in done.versions}
        if versions - {self.coordinator.version}:
            raise OffPolicy(
                f"trajectory {event.trajectory} holds tokens of versions {sorted(versions)};"
                f" the rollout's is {self.coordinator.version}"
            )
        held.engines[event.trajectory.sample] = event.engine
        held.trajectories[event.trajectory.sample] = Trajectory(
            id=event.trajectory,
            prompt_ids=np.array(held.prompt.token_ids, np.int32),
            output_ids=np.frombuffer(done.output_ids, np.int32),
            logprobs=np.frombuffer(done.logprobs, np.float32),
            versions=tuple(VersionSpan(*span) for span in done.versions),
            finish="deadline" if event.finish == "abort" else event.finish,
        )

    # ---- commands out

    def _perform(self, command: RolloutCommand) -> None:
        match command:
            case SendTurn():
                self._send_turn(command)
            case AbortTurn():
                self._to_engine(command.engine, CancelTurn(command.trajectory))
            case ScoreTrajectory():
                self._begin(self._score(command.trajectory))
            case FilterGroup():
                self._begin(self._filter(command.group))
            case SendGroup():
                self._send_group(command)
            case DropGroup():
                self._to_trainer(Dropped(command.group, command.order, command.iteration))
                held = self._held.pop(command.group)
                if command.rewards:  # else it was not needed any more, and may be incomplete
                    held.record(self._dump, command.group, command.iteration, None)
            case UpdateEngine():
                self._to_engine(command.engine, LoadWeights(command.version))
            case ConfirmWeights():
                self._to_trainer(Confirmed(command.version))
            case RequestRollout():
                self._draw(command)
            case RequestGroups():
                groups = self._draw_training(command.iteration, command.count)
                self._inbox.append(GroupsDrawn(t=self._world.clock(), iteration=command.iteration, groups=groups))
            case EndRollout():
                self._to_trainer(
                    Ended(command.iteration, command.version, command.groups_sent, command.groups_dropped, self._cursor)
                )
                self._dump.flush(command.iteration)
            case EndEvaluation():
                self._end_evaluation(command)
            case FinishRun():
                self.reason = command.reason
            case ServingComplete():
                pass  # the coordinator itself acts on it; it stands in the log for the reader

    def _draw(self, request: RequestRollout) -> None:
        if request.purpose == "train":
            self._first_order = 0
            count = self.config.rollout.groups_per_iteration + self.config.over_sampling_groups
            groups = self._draw_training(request.iteration, count)
        else:
            prompts = self._data.held_out
            groups = self._hold([-1 - order for order in range(len(prompts))], prompts, 1)
        self._inbox.append(
            RolloutRequested(
                t=self._world.clock(),
                iteration=request.iteration,
                version=request.version,
                purpose=request.purpose,
                trajectories_per_group=self.config.rollout.trajectories_per_group if request.purpose == "train" else 1,
                groups=groups,
            )
        )

    def _draw_training(self, iteration: int, count: int) -> tuple[GroupSpec, ...]:
        """The next prompts. Training groups are numbered over the run, held-out ones are negative."""
        chosen, self._cursor = self._data.order.take(self._cursor, count)
        first = iteration * self.config.most_groups + self._first_order
        self._first_order += count
        prompts = [self._data.train[i] for i in chosen]
        return self._hold(list(range(first, first + count)), prompts, self.config.rollout.trajectories_per_group)

    def _hold(self, ids: list[GroupId], prompts: list[Prompt], samples: int) -> tuple[GroupSpec, ...]:
        self._held.update({group: HeldGroup(prompt, samples) for group, prompt in zip(ids, prompts)})
        return tuple(GroupSpec(group, len(prompt.token_ids)) for group, prompt in zip(ids, prompts))

    def _send_turn(self, command: SendTurn) -> None:
        prompt = self._held[command.trajectory.group].prompt
        training = self.coordinator.purpose == "train"
        self._to_engine(
            command.engine,
            StartTurn(
                command=command,
                token_ids=np.array(prompt.token_ids, np.int32).tobytes(),
                temperature=self.config.rollout.temperature if training else self.config.evaluation.temperature,
                max_new_tokens=self.config.rollout.max_new_tokens,
            ),
        )

    async def _score(self, trajectory: TrajectoryId) -> None:
        held = self._held[trajectory.group]
        response = held.trajectories[trajectory.sample]
        assert response is not None
        text = held.texts[trajectory.sample] = self._data.decode(response.output_ids.tolist())
        started_t = self._world.clock()
        score = await self._rewards.score(held.prompt, text, len(response.output_ids))
        held.rewards[trajectory.sample], held.errors[trajectory.sample] = score.reward, score.error
        self._inbox.append(
            TrajectoryScored(
                t=self._world.clock(), trajectory=trajectory, reward=score.reward, started_t=started_t, error=score.error
            )
        )

    async def _filter(self, group: GroupId) -> None:
        held = self._held[group]
        started_t = self._world.clock()
        answer = await self._rewards.keeps(self.config.filter_function, held.prompt, held.texts, held.rewards)
        if answer.error:
            self._watch.say(f"group {group}: {answer.error}; it is kept")
        keep = bool(answer.error) or answer.reward != 0
        self._inbox.append(
            GroupFiltered(t=self._world.clock(), group=group, keep=keep, started_t=started_t, error=answer.error)
        )

    def _send_group(self, command: SendGroup) -> None:
        held = self._held[command.group]
        data, tokens = held.packed(command.rewards, command.advantages)
        self._waiting[command.group] = data
        self._to_trainer(GroupHeader(command.group, command.order, command.iteration, command.version, tokens, len(data)))
        held.record(self._dump, command.group, command.iteration, command.advantages)

    def _end_evaluation(self, command: EndEvaluation) -> None:
        for order in range(command.count):
            self._held.pop(-1 - order).record(self._dump, -1 - order, command.iteration, None)
        self._dump.flush(command.iteration)

    def _to_engine(self, engine: int, message: StartTurn | CancelTurn | LoadWeights | Join) -> None:
        if engine == 0:
            assert self._owner is not None
            self._owner.handle(message)
        else:
            self._mailbox.send(engine * self.config.engine.tp, message)

    def _to_trainer(self, message: Message) -> None:
        self._mailbox.send(self._world.training_coordinator, message)

"""What does the rollout coordinator's rank do?

It runs `control.rollout.RolloutCoordinator` with a clock and IO: events in, commands out, each to the log, each command
performed by one method below. Payloads (tokens, log-probs) stay here, under their group, until the trainer holds them.

    waits for               unblocked by                   bounded by
    engines to start        EngineUp of each               engine.start_deadline_s
    a lost engine           EngineBack                     engine.start_deadline_s, engine.restarts times
    the trainer's weights   Offer, then WeightsLoaded      limits.message_s
    a turn                  TurnDone                       rollout.trajectory_deadline_s, engine.stall_deadline_s
    a reward, an answer     the reward pool                reward.deadline_s
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
    GiveUp,
    GroupFiltered,
    GroupReceived,
    GroupsDrawn,
    GroupSpec,
    RequestGroups,
    RequestRollout,
    RestartEngine,
    RolloutCommand,
    RolloutEvent,
    RolloutRequested,
    RunTool,
    ScoreTrajectory,
    SendGroup,
    SendTurn,
    ServingComplete,
    StepTrained,
    StopRequested,
    ToolFinished,
    TrajectoryScored,
    TurnFinished,
    UpdateEngine,
    WeightsOffered,
)
from rpipe.core.types import GroupId, TrajectoryId
from rpipe.rollout.drawing import Drawing
from rpipe.rollout.held import HeldGroup, Part, RolloutData
from rpipe.rollout.kept import KeptGroups
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
    Condemn,
    Confirmed,
    Dropped,
    Ended,
    EngineBack,
    EngineDown,
    EngineFailed,
    EnginesUp,
    EngineUp,
    GroupHeader,
    Join,
    LoadWeights,
    Message,
    Offer,
    Partial,
    Published,
    Ready,
    Received,
    Restart,
    Standing,
    StartTurn,
    StepReport,
    Stop,
    Takers,
    TrainerState,
    TurnBegan,
    TurnDone,
    WeightsLoaded,
)
from rpipe.runtime.world import World

POLL_S = 0.005  # of MPI; what this rank's own engine and rewards say wakes the loop at once
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
        kept: KeptGroups,
    ) -> None:
        self.config = config
        self.coordinator = RolloutCoordinator(rollout_settings(config))
        self._world, self._log, self._mailbox, self._channel = world, log, mailbox, channel
        self._data, self._dump, self._watch, self._kept = data, dump, watch, kept
        self._owner: EngineOwner | None = None
        self._rewards = RewardPool(config.reward, config.run.seed, log_path=rewards_log)
        self._inbox: deque[RolloutEvent] = deque()
        self._woken = asyncio.Event()  # something may have come
        self._held: dict[GroupId, HeldGroup] = {}
        self._waiting: dict[GroupId, NDArray[np.uint8]] = {}  # packed groups that may not be sent before the trainer is Ready
        self._sent: dict[GroupId, Sent] = {}
        self._weights_came = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._engines_up: set[int] = set()
        self._lives = [0] * config.engines  # how often each was started again
        self._published: Published | None = None  # the newest
        self._undrawn: RequestRollout | None = None  # until the trainer has told which weights these are
        self._drawing = Drawing(config, data, kept)
        self._failure: BaseException | None = None
        self._last_t = 0.0
        self.reason = ""

    # ---- the loop

    async def run(self, owner: EngineOwner) -> str:
        """Until FinishRun; returns its reason. Raises RolloutError, OffPolicy, TimeoutError."""
        self._owner = owner
        owner.reply = self.receive
        self._world.waits = self._waits
        try:
            functions = dict(self._data.reward_functions)
            if self.config.filter_function:
                functions[self.config.filter_function] = "rollout.filter"
            if self.config.environment_function:
                functions[self.config.environment_function] = "rollout.environment"
            await self._rewards.start(functions)  # a mistyped name ends the job before an engine starts
            owner.start()
            while not self.coordinator.done:
                self._turn_crank()
                await self._pause()
            if self._failure is not None:
                raise self._failure
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
            self._kept.close()
            with contextlib.suppress(TimeoutError):  # a peer that is gone takes nothing; why it went is the error to show
                self._mailbox.drain(self.config.limits.stop_s)

    async def _pause(self) -> None:
        """Until this rank's own engine or a reward has said something, or MPI is to be asked again: asking costs CPU that the
        engine's processes want."""
        self._woken.clear()  # what came until now is done; and a set event would not let the loop's other tasks run
        alarm = asyncio.get_running_loop().call_later(POLL_S, self._woken.set)
        await self._woken.wait()
        alarm.cancel()

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
        self._watch.saw(event.t, event)
        commands = self.coordinator.on(event)
        for command in commands:
            self._log.command(event.t, command)
        if commands:
            self._log.flush()
        for command in commands:
            self._watch.saw(event.t, command)
            self._perform(command)
        if isinstance(event, WeightsOffered):
            takers = [c.engine for c in commands if isinstance(c, UpdateEngine)]
            self._to_trainer(Takers(event.version, tuple((engine, self._lives[engine]) for engine in takers)))

    def _waiting_for(self) -> str:
        if len(self._engines_up) < self.config.engines:
            return f"engines {sorted(set(range(self.config.engines)) - self._engines_up)} to start"
        return self.coordinator.waiting_for()

    def _waits(self) -> list[str]:
        """For a person who looks at a job that hangs."""
        now_t, deadline_t = self._world.clock(), self.coordinator.next_deadline_t
        flights = [self.coordinator.turns.in_flight[engine] for engine in range(self.config.engines)]
        return [
            f"waits for {self._waiting_for()}",
            f"iteration {self.coordinator.iteration}, version {self.coordinator.version}, {self.coordinator.purpose}",
            f"groups: {self.coordinator.groups_deferred} deferred, {self.coordinator.groups_in_service} in service;"
            f" held: {sorted(self._held)}",
            f"channel: {sorted(self._waiting)} wait for the trainer, {sorted(self._sent)} are on their way",
            f"engines {sorted(self.coordinator.engines.serving)} serve; trajectories on each: {flights}; lives: {self._lives}",
            f"next deadline in {deadline_t - now_t:.1f} s" if deadline_t is not None else "no deadline is near",
            *self._mailbox.states(),
        ]

    def _begin(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._woken.set()
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    # ---- messages in

    def receive(self, message: AnyMessage | Message) -> None:
        """From an engine owner (directly or over MPI) or from the trainer."""
        self._woken.set()
        now = self._world.clock()
        match message:
            case TurnDone():
                self._inbox.append(self._store(message))
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
            case Standing():
                self._drawing.cursor = message.cursor
                if message.iteration:
                    self._watch.say(self._going_on(message.iteration))
            case Join():
                self._to_engine(message.engine, message)
            case Published():
                self._published = message
                if self._undrawn is not None:
                    self._draw(self._undrawn)
                for engine, life, reason in message.failed:
                    self._to_engine(engine, Condemn(life, reason))
            case EngineDown():
                self._engine_down(message)
            case EngineBack():
                if message.life == self._lives[message.event.engine]:
                    self._inbox.append(message.event)
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

    def _engine_down(self, message: EngineDown) -> None:
        """What a life of the engine says of itself counts until the next one was asked for."""
        if message.life != self._lives[message.event.engine]:
            return
        self._watch.say(message.event.reason)
        for partial in message.partials:
            self._take(partial.trajectory, Part(*_arrays(partial), partial.versions))
        self._inbox.append(message.event)

    def _take(self, trajectory: TrajectoryId, part: Part) -> None:
        versions = {version for _, _, version in part.spans}
        if versions - {self.coordinator.version}:
            raise OffPolicy(
                f"trajectory {trajectory} holds tokens of versions {sorted(versions)};"
                f" the rollout's is {self.coordinator.version}"
            )
        self._held[trajectory.group].take(trajectory.sample, part)

    def _store(self, done: TurnDone) -> TurnFinished:
        """The turn is complete: its event, with the tokens that lost engines had made."""
        event, held = done.event, self._held[done.event.trajectory.group]
        self._take(event.trajectory, Part(*_arrays(done), done.versions))
        held.engines[event.trajectory.sample] = event.engine
        whole = held.join(event.trajectory, "deadline" if event.finish == "abort" else event.finish)
        start, end = whole.pieces[-1]
        return msgspec.structs.replace(event, output_tokens=end - start)

    # ---- commands out

    def _perform(self, command: RolloutCommand) -> None:
        match command:
            case SendTurn():
                self._send_turn(command)
            case AbortTurn():
                self._to_engine(command.engine, CancelTurn(command.trajectory))
            case RunTool():
                self._begin(self._answer(command))
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
                self._to_engine(command.engine, LoadWeights(self._lives[command.engine], command.version))
            case RestartEngine():
                self._lives[command.engine] += 1
                self._to_engine(command.engine, Restart(self._lives[command.engine], command.version))
            case GiveUp():
                self._failure = RolloutError(command.reason)
            case ConfirmWeights():
                self._to_trainer(Confirmed(command.version))
            case RequestRollout():
                self._draw(command)
            case RequestGroups():
                groups = self._hold(self._drawing.more(command.iteration, command.count))
                self._inbox.append(GroupsDrawn(t=self._world.clock(), iteration=command.iteration, groups=groups))
            case EndRollout():
                self._to_trainer(
                    Ended(command.iteration, command.version, command.groups_sent, command.groups_dropped, self._drawing.cursor)
                )
                self._dump.flush(command.iteration)
            case EndEvaluation():
                self._end_evaluation(command)
            case FinishRun():
                self.reason = command.reason
            case ServingComplete():
                pass  # the coordinator itself acts on it; it stands in the log for the reader

    def _draw(self, request: RequestRollout) -> None:
        if self._published is None or self._published.version != request.version:
            self._undrawn = request
            return
        self._undrawn = None
        if request.purpose == "train":
            groups = self._drawing.begin(request.iteration, request.version, self._published.fingerprint)
        else:
            groups = self._drawing.held_out()
        specs = self._hold(groups)
        self._inbox.append(
            RolloutRequested(
                t=self._world.clock(),
                iteration=request.iteration,
                version=request.version,
                purpose=request.purpose,
                trajectories_per_group=self.config.rollout.trajectories_per_group if request.purpose == "train" else 1,
                groups=specs,
            )
        )
        if taken := sum(held.restored for held in groups.values()):
            self._watch.say(f"{taken} groups of iteration {request.iteration} were finished before and are not generated again")

    def _hold(self, groups: dict[GroupId, HeldGroup]) -> tuple[GroupSpec, ...]:
        self._held.update(groups)
        return tuple(held.spec(group) for group, held in groups.items())

    def _send_turn(self, command: SendTurn) -> None:
        held = self._held[command.trajectory.group]
        training = self.coordinator.purpose == "train"
        self._to_engine(
            command.engine,
            StartTurn(
                life=self._lives[command.engine],
                command=command,
                token_ids=held.tokens_so_far(command.trajectory.sample).tobytes(),
                temperature=self.config.rollout.temperature if training else self.config.evaluation.temperature,
                max_new_tokens=self.config.rollout.max_new_tokens - command.history_tokens - command.prefix_tokens,
            ),
        )

    async def _answer(self, command: RunTool) -> None:
        held, sample = self._held[command.trajectory.group], command.trajectory.sample
        started_t = self._world.clock()
        texts = held.read(sample, self._data.decode)
        said = await self._rewards.answer(self.config.environment_function, held.prompt, texts)
        held.failed |= bool(said.error)
        ids = self._data.encode(said.text) if said.text else []
        if ids:
            held.answered(sample, ids)
        self._inbox.append(
            ToolFinished(
                t=self._world.clock(),
                trajectory=command.trajectory,
                turn=command.turn,
                observation_tokens=len(ids),
                done=not ids,
                started_t=started_t,
                error=said.error,
            )
        )

    async def _score(self, trajectory: TrajectoryId) -> None:
        held = self._held[trajectory.group]
        response = held.trajectories[trajectory.sample]
        assert response is not None
        texts = held.read(trajectory.sample, self._data.decode)
        started_t = self._world.clock()
        score = await self._rewards.score(held.prompt, texts[-1], len(response.output_ids), texts)
        held.rewards[trajectory.sample], held.errors[trajectory.sample] = score.reward, score.error
        held.scored += 1
        held.failed |= bool(score.error)
        if held.scored == len(held.trajectories) and trajectory.group >= 0 and not held.failed:
            self._kept.add(held.kept(trajectory.group))
        self._inbox.append(
            TrajectoryScored(
                t=self._world.clock(), trajectory=trajectory, reward=score.reward, started_t=started_t, error=score.error
            )
        )

    async def _filter(self, group: GroupId) -> None:
        held = self._held[group]
        started_t = self._world.clock()
        responses = [texts[-1] for texts in held.texts]
        answer = await self._rewards.keeps(self.config.filter_function, held.prompt, responses, held.rewards)
        if answer.error:
            self._watch.say(f"group {group}: {answer.error}; it is kept")
        keep = bool(answer.error) or answer.reward != 0
        self._inbox.append(
            GroupFiltered(t=self._world.clock(), group=group, keep=keep, started_t=started_t, error=answer.error)
        )

    def _send_group(self, command: SendGroup) -> None:
        held = self._held[command.group]
        data, tokens = held.packed(command.rewards, command.advantages)
        if self._channel.patient:
            self._sent[command.group] = self._channel.send(data, CHANNEL_TRAINER)
        else:
            self._waiting[command.group] = data
        self._to_trainer(GroupHeader(command.group, command.order, command.iteration, command.version, tokens, len(data)))
        held.record(self._dump, command.group, command.iteration, command.advantages)

    def _end_evaluation(self, command: EndEvaluation) -> None:
        for order in range(command.count):
            self._held.pop(-1 - order).record(self._dump, -1 - order, command.iteration, None)
        self._dump.flush(command.iteration)

    def _to_engine(self, engine: int, message: StartTurn | CancelTurn | LoadWeights | Join | Condemn | Restart) -> None:
        if engine == 0:
            assert self._owner is not None
            self._owner.handle(message)
        else:
            self._mailbox.send(engine * self.config.engine.tp, message)

    def _to_trainer(self, message: Message) -> None:
        self._mailbox.send(self._world.training_coordinator, message)


def _arrays(said: TurnDone | Partial) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return np.frombuffer(said.output_ids, np.int32), np.frombuffer(said.logprobs, np.float32)

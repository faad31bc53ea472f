"""The rollout coordinator: from weights on the engines to complete groups on their way to the trainer.

    WeightsOffered       -> UpdateEngine on each         all updated -> RequestRollout (evaluation if due, else the iteration)
    RolloutRequested     -> SendTurn for admitted groups (admission policy), engine by placement policy
    TurnStarted          -> its deadline is set; SendTurn for its siblings, which it led (control/turns.py)
    TurnFinished         -> RunTool where the environment may answer; else the trajectory is generated
    ToolFinished         -> SendTurn, the next one; or the trajectory is generated
      generated          -> ScoreTrajectory; all K generated -> ServingComplete: the group leaves the frontier; admit again
    TrajectoryScored     -> all K scored -> (FilterGroup -> GroupFiltered ->) SendGroup | DropGroup
    DropGroup            -> RequestGroups -> GroupsDrawn, while fewer than R can still be kept (control/selection.py)
    R sent               -> what is not needed any more is cut and dropped; EndRollout
    StepTrained          -> admit again: a soft frontier follows the trainer (policy/admission.py)
    DeadlinePassed       -> AbortTurn for what ran too long; what it has is scored
    EngineLost           -> its trajectories: SendTurn elsewhere, from the prefix they had; RestartEngine
    EngineRestarted      -> it takes requests again, if its weights are the rollout's
    StopRequested        -> FinishRun

A state machine without IO: no clock (time is `event.t`), no randomness, ties break by id. The same object runs in the job
and in the simulator; replaying a log's events gives the same commands.
"""

from __future__ import annotations

from collections import deque

from rpipe.control.engines import OUT_OF_SERVICE
from rpipe.control.load import Meter
from rpipe.control.rollout_settings import RolloutSettings
from rpipe.control.selection import Selection
from rpipe.control.state import GroupRecord, GroupState, TrajectoryRecord, TrajectoryState
from rpipe.control.turns import Turns
from rpipe.core.events import (
    ConfirmWeights,
    DeadlinePassed,
    DropGroup,
    EndEvaluation,
    EndRollout,
    EngineLost,
    EngineReady,
    EngineRestarted,
    EngineUpdated,
    FilterGroup,
    FinishRun,
    GiveUp,
    GroupFiltered,
    GroupReceived,
    GroupsDrawn,
    GroupSpec,
    Purpose,
    RequestGroups,
    RequestRollout,
    RestartEngine,
    RolloutCommand,
    RolloutEvent,
    RolloutRequested,
    ScoreTrajectory,
    SendGroup,
    ServingComplete,
    StepTrained,
    StopRequested,
    ToolFinished,
    TrajectoryScored,
    TurnFinished,
    TurnStarted,
    UpdateEngine,
    WeightsOffered,
)
from rpipe.core.types import GroupId, TrajectoryId, Version
from rpipe.policy.admission import Fifo
from rpipe.policy.advantage import shuffled, zero_variance


class OffPolicy(AssertionError):
    """Tokens of another weight version than the rollout's reached a coordinator."""


class RolloutCoordinator:
    """`on(event)` returns what must be done, in order. Raises AssertionError where the events cannot be true."""

    def __init__(self, settings: RolloutSettings) -> None:
        self.settings = settings
        self.done = False
        self.version: Version = -1  # offered or held by the engines
        self.iteration = -1
        self.purpose: Purpose = "train"
        self.groups: dict[GroupId, GroupRecord] = {}  # of the current rollout, in submission order
        self._meter = Meter(settings.engines, settings.slots_per_engine, settings.max_new_tokens)
        # Fifo fills an engine's queue: siblings would come behind younger groups, and start one by one there in any case.
        leads = not isinstance(settings.admission, Fifo)
        self.turns = Turns(settings, self._meter, leads)
        self.engines = self.turns.engines
        self._confirmed: Version = -1  # the newest that the trainer knows to be held
        self._deferred: deque[GroupRecord] = deque()  # in submission order
        self._in_service: dict[GroupId, GroupRecord] = {}
        self._unreceived_bytes: dict[GroupId, int] = {}
        self._queued_bytes = 0  # their sum
        self._evaluated: Version = -1
        self._sent = self._dropped = 0
        self._samples = 0  # K
        self._selection = Selection(0)
        self._order: list[GroupRecord] = []  # the same groups, by submission order
        self._ending = False  # nothing more is needed
        self._surplus = 0  # groups not needed of which something is awaited

    def on(self, event: RolloutEvent) -> list[RolloutCommand]:
        if self.done:
            return []
        match event:
            case TurnFinished():
                return self._turn_finished(event)
            case TurnStarted():
                return [*self.turns.started(event, self.groups[event.trajectory.group])]
            case ToolFinished():
                return self._tool_finished(event)
            case TrajectoryScored():
                return self._scored(event)
            case GroupFiltered():
                return self._filtered(event)
            case GroupReceived():
                self._queued_bytes -= self._unreceived_bytes.pop(event.group)
                return self._admit()
            case StepTrained():
                self._meter.trained(event.groups, event.busy_s, event.iteration == self.iteration)
                return self._admit()
            case RolloutRequested():
                return self._requested(event)
            case GroupsDrawn():
                return self._drawn(event)
            case EngineReady():
                self._meter.engine_ready(event.engine, event.kv_tokens)
                return []
            case WeightsOffered():
                return self._offered(event)
            case EngineUpdated():
                return self._updated(event)
            case EngineLost():
                return self._engine_lost(event)
            case EngineRestarted():
                return self._engine_restarted(event)
            case DeadlinePassed():
                return [*self.turns.overdue(event.t)]
            case StopRequested():
                self.done = True
                return [FinishRun(reason=event.reason)]

    @property
    def next_deadline_t(self) -> float | None:
        """When DeadlinePassed is due, or None."""
        return self.turns.next_deadline_t

    @property
    def groups_in_service(self) -> int:
        return len(self._in_service)

    @property
    def groups_deferred(self) -> int:
        return len(self._deferred)

    def waiting_for(self) -> str:
        """What has not happened yet, for the message of a wait that ended."""
        if self.engines.updating:
            return f"engines {sorted(self.engines.updating)} to hold weights of version {self.version}"
        if running := self.turns.running:
            trajectory, record = next(iter(running.items()))
            return f"trajectory {trajectory} on engine {record.engine} (and {len(running) - 1} others)"
        if in_tool := self.turns.in_tool:
            trajectory, record = next(iter(in_tool.items()))
            others = f" (and {len(in_tool) - 1} others)" if len(in_tool) > 1 else ""
            return f"the environment to answer turn {record.turn} of trajectory {trajectory}{others}"
        if self.turns.interrupted or (self.groups and not self.engines.serving):
            return "an engine to be started again"
        unscored = [g.group for g in self.groups.values() if g.state is GroupState.SERVED]
        if unscored:
            return f"the rewards of group {unscored[0]}"
        if self._unreceived_bytes:
            return f"the trainer to receive group {next(iter(self._unreceived_bytes))}"
        return f"the trainer's weights of version {self.version + 1}"

    # ---- weights

    def _offered(self, event: WeightsOffered) -> list[RolloutCommand]:
        assert event.version > self.version, f"weights of version {event.version} offered after {self.version}"
        assert not self.turns.busy, "weights offered while trajectories run"
        assert not self.engines.updating, "weights offered while others are on their way"
        self.version = event.version
        return [UpdateEngine(engine=engine, version=event.version) for engine in self.engines.offered()]

    def _updated(self, event: EngineUpdated) -> list[RolloutCommand]:
        assert event.version == self.version, f"engine {event.engine} holds version {event.version}, not {self.version}"
        self.engines.updated(event.engine)
        self.turns.in_flight[event.engine] = 0
        return self._confirm()

    def _confirm(self) -> list[RolloutCommand]:
        """Once for each version: every engine that lives holds it, and one does live."""
        if self._confirmed == self.version or self.engines.updating or not self.engines.serving:
            return []
        self._confirmed = self.version
        return [ConfirmWeights(version=self.version), *self._next_rollout()]

    def _next_rollout(self) -> list[RolloutCommand]:
        """All engines hold `version`, which is also the number of iterations trained."""
        s, version = self.settings, self.version
        due = (
            version == 0
            or version >= s.iterations
            or (s.evaluate_every_iterations and version % s.evaluate_every_iterations == 0)
        )
        if s.evaluate and due and self._evaluated != version:
            self._evaluated = version
            return [RequestRollout(iteration=version, version=version, purpose="eval")]
        if version < s.iterations:
            return [RequestRollout(iteration=version, version=version, purpose="train")]
        self.done = True
        return [FinishRun()]

    # ---- one rollout

    def _requested(self, event: RolloutRequested) -> list[RolloutCommand]:
        assert event.version == self.version, f"rollout of version {event.version} on engines of version {self.version}"
        assert not self.turns.busy and not self._deferred, "a rollout was requested while another one runs"
        self.iteration, self.purpose = event.iteration, event.purpose
        self._sent = self._dropped = 0
        self._samples = event.trajectories_per_group
        training = event.purpose == "train"
        ahead, refill = (self.settings.over_sampling_groups, self.settings.refill_groups) if training else (0, 0)
        self._selection = Selection(len(event.groups) - ahead, ahead, refill)
        self._meter.requested(event.t, self._selection.wanted, training, self._samples)
        self.groups, self._order, self._ending = {}, [], False
        self._take_in(event.groups)
        return self._begin(event.groups)

    def _begin(self, specs: tuple[GroupSpec, ...]) -> list[RolloutCommand]:
        restored = [c for spec in specs if spec.rewards for c in self._restore(self.groups[spec.group], spec)]
        return [*restored, *self._admit(), *(self._end_if_complete() if restored else [])]

    def _take_in(self, specs: tuple[GroupSpec, ...]) -> list[GroupRecord]:
        first = len(self._order)
        for spec in specs:
            trajectories = [TrajectoryRecord() for _ in range(self._samples)]
            group = GroupRecord(spec.group, len(self._order), spec.prompt_tokens, trajectories)
            self.groups[spec.group] = group
            self._order.append(group)
            if not spec.rewards:
                self._deferred.append(group)
        self._selection.drew(len(specs))
        return self._order[first:]

    def _drawn(self, event: GroupsDrawn) -> list[RolloutCommand]:
        assert event.iteration == self.iteration, f"groups of iteration {event.iteration} in {self.iteration}"
        new = self._take_in(event.groups)
        return [*self._give_up(new), *self._end()] if self._ending else self._begin(event.groups)

    def _restore(self, group: GroupRecord, spec: GroupSpec) -> list[RolloutCommand]:
        """An interrupted attempt had finished it, under these very weights: only what follows the rewards is done again."""
        group.become(GroupState.IN_SERVICE)
        for index, (tokens, reward) in enumerate(zip(spec.output_tokens, spec.rewards)):
            for state in (TrajectoryState.RUNNING, TrajectoryState.GENERATED, TrajectoryState.SCORED):
                record = group.trajectory(index, state)
            record.output_tokens, record.reward = tokens, reward
            record.turn = spec.turns[index] - 1 if spec.turns else 0
        group.unfinished = group.unscored = 0
        group.become(GroupState.SERVED)
        self._meter.restored()
        return self._materialize(group)

    def _admit(self) -> list[RolloutCommand]:
        commands: list[RolloutCommand] = []
        # Of the held-out groups nobody waits for the first; a frontier of groups of one would leave the engines idle.
        policy = self.settings.admission if self.purpose == "train" else Fifo()
        while self._deferred and self.engines.serving and self._queued_bytes <= self.settings.queue_bytes:
            if not policy.admits(self._meter.load(len(self._in_service))):
                break
            group = self._deferred.popleft()
            group.become(GroupState.IN_SERVICE)
            self._in_service[group.group] = group
            commands += self.turns.place(group, self.version)
        return commands

    def _turn_finished(self, event: TurnFinished) -> list[RolloutCommand]:
        trajectory = event.trajectory
        if event.version != self.version:
            raise OffPolicy(
                f"trajectory {trajectory}: engine {event.engine} sampled under version {event.version},"
                f" the rollout's is {self.version}"
            )
        group = self.groups[trajectory.group]
        commands = self.turns.finished(event, group)
        if trajectory in self.turns.in_tool:
            return [*commands, *self._admit()]
        return [*commands, *self._generated(group, trajectory, event.t)]

    def _tool_finished(self, event: ToolFinished) -> list[RolloutCommand]:
        group = self.groups[event.trajectory.group]
        commands = self.turns.answered(event, group, self.version)
        if group.trajectories[event.trajectory.sample].state is not TrajectoryState.GENERATED:
            return [*commands]
        return self._generated(group, event.trajectory, event.t)

    def _generated(self, group: GroupRecord, trajectory: TrajectoryId, t: float) -> list[RolloutCommand]:
        if group.surplus:
            return self._settle(group)
        self._meter.responded(group.trajectories[trajectory.sample].output_tokens)
        group.awaited += 1
        commands: list[RolloutCommand] = [ScoreTrajectory(trajectory=trajectory)]
        if not group.unfinished:
            group.become(GroupState.SERVED)
            del self._in_service[group.group]
            self._meter.served(t, max(record.output_tokens for record in group.trajectories))
            commands.append(ServingComplete(group=group.group))
        return [*commands, *self._admit()]

    # ---- from rewards to the trainer

    def _scored(self, event: TrajectoryScored) -> list[RolloutCommand]:
        group = self.groups[event.trajectory.group]
        group.trajectory(event.trajectory.sample, TrajectoryState.SCORED).reward = event.reward
        group.unscored -= 1
        group.awaited -= 1
        if group.surplus:
            return self._settle(group)
        if group.unscored:
            return []
        if self.purpose == "eval":
            group.become(GroupState.SENT)
            self._sent += 1
            return self._end_evaluation_if_complete()
        return [*self._materialize(group), *self._end_if_complete()]

    def _materialize(self, group: GroupRecord) -> list[RolloutCommand]:
        """RolloutPipe, section 3.2: all finished, all scored -> filter, then advantages."""
        if self.settings.drop_zero_variance and zero_variance(group.rewards):
            return self._drop(group, "zero variance")
        if self.settings.filter_function:
            group.awaited += 1
            return [FilterGroup(group=group.group)]
        return self._keep(group)

    def _filtered(self, event: GroupFiltered) -> list[RolloutCommand]:
        group = self.groups[event.group]
        group.awaited -= 1
        if group.surplus:
            return self._settle(group)
        kept = self._keep(group) if event.keep else self._drop(group, f"refused by {self.settings.filter_function}")
        return [*kept, *self._end_if_complete()]

    def _keep(self, group: GroupRecord) -> list[RolloutCommand]:
        if self._selection.needs(group.order):
            return [self._send_group(group)]
        group.become(GroupState.HELD)
        return []

    def _drop(self, group: GroupRecord, reason: str) -> list[RolloutCommand]:
        """What was held takes its place, else more is asked for."""
        self._meter.dropped()
        commands = self._let_go(group, group.rewards, reason)
        chosen = (self._order[order] for order in self._selection.refuse(group.order))
        commands += [self._send_group(g) for g in chosen if g.state is GroupState.HELD]
        if count := self._selection.ask():
            commands.append(RequestGroups(iteration=self.iteration, version=self.version, count=count))
        return [*commands, *self._admit()]

    def _let_go(self, group: GroupRecord, rewards: tuple[float, ...], reason: str) -> list[RolloutCommand]:
        group.become(GroupState.DROPPED)
        self._dropped += 1
        return [
            DropGroup(group=group.group, order=group.order, iteration=self.iteration, rewards=rewards, reason=reason),
        ]

    def _send_group(self, group: GroupRecord) -> SendGroup:
        group.become(GroupState.SENT)
        self._sent += 1
        rewards = group.rewards
        nbytes = self._unreceived_bytes[group.group] = group.channel_bytes
        self._queued_bytes += nbytes
        credited = shuffled(rewards, group.group) if self.settings.shuffle_rewards else rewards
        return SendGroup(
            group=group.group,
            order=group.order,
            iteration=self.iteration,
            version=self.version,
            rewards=rewards,
            advantages=self.settings.advantage(credited),
        )

    # ---- the rollout's end

    def _end_evaluation_if_complete(self) -> list[RolloutCommand]:
        if self._sent < len(self.groups):
            return []
        rewards = [r for g in self.groups.values() for r in g.rewards]
        end = EndEvaluation(
            iteration=self.iteration, version=self.version, count=len(rewards), reward_mean=sum(rewards) / len(rewards)
        )
        return [end, *self._next_rollout()]

    def _end_if_complete(self) -> list[RolloutCommand]:
        """R were sent, or all that could be: what else was drawn is cut and dropped, and when nothing of it is awaited any
        more the rollout ends."""
        if self._ending or self._sent < self._selection.selected or not self._selection.final:
            return []
        self._ending = True
        left = [group for group in self._order[self._selection.end :] if group.state is not GroupState.DROPPED]
        return [*self._give_up(left), *self._end()]

    def _give_up(self, groups: list[GroupRecord]) -> list[RolloutCommand]:
        commands: list[RolloutCommand] = []
        for group in groups:
            group.surplus = True
            self._in_service.pop(group.group, None)
            commands += self.turns.cut(group)
            self._surplus += 1
            if group.state is GroupState.DEFERRED:
                if group in self._deferred:  # else an interrupted attempt had finished it
                    self._deferred.remove(group)
                commands += self._drop_surplus(group)
            elif not group.unfinished and not group.awaited:
                commands += self._drop_surplus(group)
        return commands

    def _settle(self, group: GroupRecord) -> list[RolloutCommand]:
        """Something of a group that is not needed any more came back."""
        if group.unfinished or group.awaited:
            return []
        return [*self._drop_surplus(group), *self._end()]

    def _drop_surplus(self, group: GroupRecord) -> list[RolloutCommand]:
        self._surplus -= 1
        return self._let_go(group, (), "surplus")

    def _end(self) -> list[RolloutCommand]:
        if self._surplus or self._selection.awaits_draw:
            return []
        return [
            EndRollout(iteration=self.iteration, version=self.version, groups_sent=self._sent, groups_dropped=self._dropped)
        ]

    # ---- engines that are lost and come back

    def _engine_lost(self, event: EngineLost) -> list[RolloutCommand]:
        losses = self.engines.lose(event.engine)
        self.turns.in_flight[event.engine] = OUT_OF_SERVICE
        made = {prefix.trajectory: prefix.output_tokens for prefix in event.prefixes}
        surplus = self.turns.interrupt(event.engine, made, self.groups, event.t)
        allowed = self.settings.engine_restarts
        if losses > allowed:
            self.done = True
            again = f"; lost {losses} times in a row (engine.restarts = {allowed})" if allowed else ""
            return [GiveUp(reason=event.reason + again)]
        commands: list[RolloutCommand] = [RestartEngine(engine=event.engine, version=self.version)]
        for group in surplus:
            commands += self._settle(group)
        return [*commands, *self._start_outdated(), *self._go_on()]

    def _engine_restarted(self, event: EngineRestarted) -> list[RolloutCommand]:
        current = event.version == self.version >= 0
        self.engines.back(event.engine, current)
        if current:
            self.turns.in_flight[event.engine] = 0
        return [*self._start_outdated(), *self._go_on()]

    def _start_outdated(self) -> list[RolloutCommand]:
        """Before the first publish nothing is outdated: whoever stands takes part in it."""
        if self.version < 0:
            return []
        return [RestartEngine(engine=engine, version=self.version) for engine in self.engines.outdated()]

    def _go_on(self) -> list[RolloutCommand]:
        """What an engine's loss or return makes possible."""
        if not self.engines.serving:
            return []
        return [*self._confirm(), *self.turns.resume(self.groups, self.version), *self._admit()]

"""Which trajectories are on which engine, when is each due, which are with the environment, and which wait for another engine?

place      an engine is chosen; the trajectory runs. With `leads`, one of a group goes ahead of its siblings on each engine:
           they are held until it has started, and find its prompt computed (SGLang shares what is in its prefix cache, not
           what is being computed)
started    its first tokens came: its deadline is set, its siblings follow
finished   it is off the engine: generated, or in a tool if the environment may answer. It may where the turn ended by
           itself ("stop", not by length, deadline or abort), fewer than `max_turns` were taken, and tokens are left
answered   the environment spoke: the next turn goes to the engine that holds its prefix, under the same version; or it was
           the last, and the trajectory is generated. In a tool it holds no slot and no deadline runs (the tool has its
           own): what is left of a trajectory's time is for generating, over all its turns
interrupt  its engine was lost: it goes on elsewhere from what it had, under the same version, so still on-policy; the time
           until it runs again is not the trajectory's. What is in a tool loses its prefix in the cache, nothing else
cut        it is not needed any more; a tool is awaited first
"""

from __future__ import annotations

from collections.abc import Mapping

from rpipe.control.deadlines import Deadlines
from rpipe.control.engines import Engines
from rpipe.control.load import Meter
from rpipe.control.rollout_settings import RolloutSettings
from rpipe.control.state import GroupRecord, TrajectoryRecord, TrajectoryState
from rpipe.core.events import AbortTurn, RunTool, SendTurn, ToolFinished, TurnFinished, TurnStarted
from rpipe.core.types import GroupId, TrajectoryId, Version
from rpipe.policy.placement import Loads

Groups = Mapping[GroupId, GroupRecord]


class Turns:
    def __init__(self, settings: RolloutSettings, meter: Meter, leads: bool) -> None:
        engines = settings.engines
        self.engines = Engines(engines)
        self.in_flight = Loads([0] * engines)  # trajectories on each engine
        self.running: dict[TrajectoryId, TrajectoryRecord] = {}  # in the order sent
        self.in_tool: dict[TrajectoryId, TrajectoryRecord] = {}
        self.interrupted: dict[TrajectoryId, TrajectoryRecord] = {}  # they wait for another engine
        self._settings, self._meter, self._leads = settings, meter, leads
        self._held: dict[tuple[GroupId, int], list[SendTurn]] = {}  # (group, engine): they wait there for their lead to start
        self._deadlines = Deadlines()  # of those that started and were not cut

    @property
    def busy(self) -> bool:
        """Something is generated, or will be."""
        return bool(self.running or self.in_tool or self.interrupted)

    @property
    def next_deadline_t(self) -> float | None:
        return self._deadlines.next_t

    def place(self, group: GroupRecord, version: Version) -> list[SendTurn]:
        """All trajectories of a group; what is held is in flight."""
        commands: list[SendTurn] = []
        sibling: int | None = None
        for index in range(len(group.trajectories)):
            command = self._place(group, index, sibling, version)
            sibling = command.engine
            held = self._held.get((group.group, sibling))
            if held is not None:
                held.append(command)
                continue
            commands.append(command)
            if self._leads:
                self._held[group.group, sibling] = []
        return commands

    def _place(self, group: GroupRecord, index: int, sibling: int | None, version: Version) -> SendTurn:
        record = group.trajectory(index, TrajectoryState.RUNNING)
        if record.engine not in self.engines.serving:  # else its earlier turns' prefix is there
            record.engine = self._settings.placement.place(self.in_flight, sibling)
        self.in_flight[record.engine] += 1
        record.beside = 0
        self._meter.sent(group.prompt_tokens)
        trajectory = TrajectoryId(group.group, index)
        self.running[trajectory] = record
        return SendTurn(
            trajectory=trajectory,
            engine=record.engine,
            priority=-group.order,
            version=version,
            turn=record.turn,
            history_tokens=record.output_tokens,
            prefix_tokens=record.prefix_tokens,
        )

    def started(self, event: TurnStarted, group: GroupRecord) -> list[SendTurn]:
        """Its siblings, where it was their lead."""
        record = self.running[event.trajectory]
        record.beside = self.in_flight[record.engine]
        if group.surplus:
            return []
        allowed_s = self._settings.trajectory_deadline_s if record.remaining_s is None else record.remaining_s
        self._deadlines.set(event.trajectory, event.t + allowed_s)
        return self._held.pop((group.group, record.engine), [])

    def finished(self, event: TurnFinished, group: GroupRecord) -> list[SendTurn | RunTool]:
        """RunTool where the environment may answer; and its siblings, where it was their lead and ended before it was seen to
        start."""
        trajectory = event.trajectory
        record = group.trajectories[trajectory.sample]
        asks = (
            event.finish == "stop"
            and record.turn + 1 < self._settings.max_turns
            and record.output_tokens + event.output_tokens < self._settings.max_new_tokens
            and not record.cut
            and not group.surplus
        )
        group.trajectory(trajectory.sample, TrajectoryState.IN_TOOL if asks else TrajectoryState.GENERATED)
        record.output_tokens += event.output_tokens
        if not record.prefix_tokens:  # else a lost engine made some of it
            beside = self.in_flight[record.engine]
            self._meter.generated(event.output_tokens - 1, event.t - event.first_token_t, record.beside or beside, beside)
        record.prefix_tokens = 0
        del self.running[trajectory]
        due_t = self._deadlines.drop(trajectory)
        self.in_flight[record.engine] -= 1
        self._meter.finished(group.prompt_tokens)
        siblings = self._held.pop((group.group, record.engine), [])
        if not asks:
            group.unfinished -= 1
            return [*siblings]
        if due_t is not None:
            record.remaining_s = max(0.0, due_t - event.t)
        self.in_tool[trajectory] = record
        return [*siblings, RunTool(trajectory=trajectory, turn=record.turn)]

    def answered(self, event: ToolFinished, group: GroupRecord, version: Version) -> list[SendTurn]:
        """Its next turn, where there is an engine. An answer that leaves no room for one is not part of the response."""
        trajectory = event.trajectory
        record = self.in_tool.pop(trajectory, None)
        asked = record is not None and event.turn == record.turn
        assert record is not None and asked, f"trajectory {trajectory}: nobody asked about its turn {event.turn}"
        ends = event.done or group.surplus or record.output_tokens + event.observation_tokens >= self._settings.max_new_tokens
        if ends:
            group.trajectory(trajectory.sample, TrajectoryState.GENERATED)
            group.unfinished -= 1
            return []
        record.turn += 1
        record.output_tokens += event.observation_tokens
        if self.engines.serving:
            return [self._place(group, trajectory.sample, None, version)]
        group.trajectory(trajectory.sample, TrajectoryState.INTERRUPTED)
        self.interrupted[trajectory] = record
        return []

    def overdue(self, t: float) -> list[AbortTurn]:
        commands: list[AbortTurn] = []
        for trajectory in self._deadlines.overdue(t):
            record = self.running[trajectory]
            record.cut = True
            commands.append(AbortTurn(trajectory=trajectory, engine=record.engine))
        return commands

    def cut(self, group: GroupRecord) -> list[AbortTurn]:
        """What of a surplus group runs comes back; what waits, for an engine or for its lead, never runs."""
        commands: list[AbortTurn] = []
        for key in [key for key in self._held if key[0] == group.group]:
            for held in self._held.pop(key):
                del self.running[held.trajectory]
                group.trajectory(held.trajectory.sample, TrajectoryState.INTERRUPTED)
                self.in_flight[held.engine] -= 1
                self._meter.finished(group.prompt_tokens)
                group.unfinished -= 1
        for index, record in enumerate(group.trajectories):
            trajectory = TrajectoryId(group.group, index)
            if record.state is TrajectoryState.RUNNING:
                self._deadlines.drop(trajectory)
                commands.append(AbortTurn(trajectory=trajectory, engine=record.engine))
            elif self.interrupted.pop(trajectory, None):
                group.unfinished -= 1
        return commands

    def interrupt(self, engine: int, made_tokens: Mapping[TrajectoryId, int], groups: Groups, t: float) -> list[GroupRecord]:
        """Everything that ran on a lost engine; returns the surplus groups among theirs, which are not sent anywhere again."""
        surplus: dict[GroupId, GroupRecord] = {}
        for key in [key for key in self._held if key[1] == engine]:
            del self._held[key]
        for record in self.in_tool.values():
            if record.engine == engine:
                record.engine = -1
        for trajectory in [trajectory for trajectory, record in self.running.items() if record.engine == engine]:
            group = groups[trajectory.group]
            record = group.trajectory(trajectory.sample, TrajectoryState.INTERRUPTED)
            del self.running[trajectory]
            deadline_t = self._deadlines.drop(trajectory)
            if deadline_t is not None or record.cut:
                record.remaining_s = 0.0 if deadline_t is None else max(0.0, deadline_t - t)
            record.prefix_tokens += made_tokens.get(trajectory, 0)
            record.engine = -1
            self._meter.finished(group.prompt_tokens)
            if group.surplus:
                group.unfinished -= 1
                surplus[group.group] = group
            else:
                self.interrupted[trajectory] = record
        return list(surplus.values())

    def resume(self, groups: Groups, version: Version) -> list[SendTurn]:
        """What was interrupted, wherever there is room."""
        waiting, self.interrupted = self.interrupted, {}
        return [self._place(groups[t.group], t.sample, None, version) for t in waiting]

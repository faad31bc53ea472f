"""Which trajectories are on which engine, when is each due, and which wait for another engine?

    place      an engine is chosen; the trajectory runs. With `leads`, one of a group goes ahead of its siblings on each engine:
               they are held until it has started, and find its prompt computed (SGLang shares what is in its prefix cache, not
               what is being computed)
    started    its first tokens came: its deadline is set, its siblings follow
    finished   it is off the engine
    interrupt  its engine was lost: it goes on elsewhere from what it had, under the same version, so still on-policy; the time
               until it runs again is not the trajectory's
    cut        it is not needed any more
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from rpipe.control.engines import Engines
from rpipe.control.load import Meter
from rpipe.control.state import GroupRecord, TrajectoryRecord, TrajectoryState
from rpipe.core.events import AbortTurn, SendTurn, TurnFinished, TurnStarted
from rpipe.core.types import GroupId, TrajectoryId, Version
from rpipe.policy.placement import Loads, Placement

Groups = Mapping[GroupId, GroupRecord]


class Turns:
    def __init__(self, engines: int, placement: Placement, deadline_s: float, meter: Meter, leads: bool) -> None:
        self.engines = Engines(engines)
        self.in_flight = Loads([0] * engines)  # trajectories on each engine
        self.running: dict[TrajectoryId, TrajectoryRecord] = {}  # in the order sent
        self.interrupted: dict[TrajectoryId, TrajectoryRecord] = {}  # they wait for another engine
        self._placement, self._deadline_s, self._meter, self._leads = placement, deadline_s, meter, leads
        self._held: dict[tuple[GroupId, int], list[SendTurn]] = {}  # (group, engine): they wait there for their lead to start
        # Of those that started and were not cut, soonest first. Ordered: a dict's first item is O(what was removed before it).
        self._deadlines_t: OrderedDict[TrajectoryId, float] = OrderedDict()

    @property
    def next_deadline_t(self) -> float | None:
        return next(iter(self._deadlines_t.values()), None)

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
        record.engine = self._placement.place(self.in_flight, sibling)
        self.in_flight[record.engine] += 1
        self._meter.sent(group.prompt_tokens)
        trajectory = TrajectoryId(group.group, index)
        self.running[trajectory] = record
        return SendTurn(
            trajectory=trajectory,
            engine=record.engine,
            priority=-group.order,
            version=version,
            prefix_tokens=record.prefix_tokens,
        )

    def started(self, event: TurnStarted, group: GroupRecord) -> list[SendTurn]:
        """Its siblings, where it was their lead."""
        record = self.running[event.trajectory]
        if group.surplus:
            return []
        allowed_s = self._deadline_s if record.remaining_s is None else record.remaining_s
        self._deadlines_t[event.trajectory] = event.t + allowed_s
        if record.remaining_s is not None:  # it goes on after a loss: its deadline is not the last one
            self._deadlines_t = OrderedDict(sorted(self._deadlines_t.items(), key=lambda item: (item[1], item[0])))
        return self._held.pop((group.group, record.engine), [])

    def finished(self, event: TurnFinished, group: GroupRecord) -> list[SendTurn]:
        """Its siblings, where it was their lead and ended before it was seen to start."""
        record = group.trajectory(event.trajectory.sample, TrajectoryState.GENERATED)
        record.output_tokens = event.output_tokens
        del self.running[event.trajectory]
        self._deadlines_t.pop(event.trajectory, None)
        self.in_flight[record.engine] -= 1
        self._meter.finished(group.prompt_tokens)
        group.unfinished -= 1
        return self._held.pop((group.group, record.engine), [])

    def overdue(self, t: float) -> list[AbortTurn]:
        commands: list[AbortTurn] = []
        while (due_t := self.next_deadline_t) is not None and due_t <= t:
            trajectory, _ = self._deadlines_t.popitem(last=False)
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
                self._deadlines_t.pop(trajectory, None)
                commands.append(AbortTurn(trajectory=trajectory, engine=record.engine))
            elif self.interrupted.pop(trajectory, None):
                group.unfinished -= 1
        return commands

    def interrupt(self, engine: int, made_tokens: Mapping[TrajectoryId, int], groups: Groups, t: float) -> list[GroupRecord]:
        """Everything that ran on a lost engine; returns the surplus groups among theirs, which are not sent anywhere again."""
        surplus: dict[GroupId, GroupRecord] = {}
        for key in [key for key in self._held if key[1] == engine]:
            del self._held[key]
        for trajectory in [trajectory for trajectory, record in self.running.items() if record.engine == engine]:
            group = groups[trajectory.group]
            record = group.trajectory(trajectory.sample, TrajectoryState.INTERRUPTED)
            del self.running[trajectory]
            deadline_t = self._deadlines_t.pop(trajectory, None)
            if deadline_t is not None or record.cut:
                record.remaining_s = 0.0 if deadline_t is None else max(0.0, deadline_t - t)
            record.prefix_tokens += made_tokens.get(trajectory, 0)
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

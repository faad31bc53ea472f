"""Where is a trajectory, where is a group, and what may follow?

    trajectory   PENDING -> RUNNING -> GENERATED -> SCORED
                 RUNNING -> IN_TOOL -> RUNNING | GENERATED         the environment answers a turn; or it was the last
                 RUNNING | IN_TOOL -> INTERRUPTED -> RUNNING       its engine was lost; there was none for its next turn
    group        DEFERRED -> IN_SERVICE -> SERVED -> [HELD ->] SENT, or DROPPED

SERVED is RolloutPipe's serving-complete, SENT its trainable-complete. HELD is kept by the filter and not selected yet
(control/selection.py); what is not needed in the end is dropped from wherever it is. Every change goes through `move`, the
one place where an illegal one is caught.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from rpipe.core.types import GroupId


class TrajectoryState(Enum):
    PENDING = "pending"
    RUNNING = "running"
    IN_TOOL = "in a tool"
    INTERRUPTED = "interrupted"
    GENERATED = "generated"
    SCORED = "scored"


class GroupState(Enum):
    DEFERRED = "deferred"
    IN_SERVICE = "in service"
    SERVED = "served"
    HELD = "held"
    SENT = "sent"
    DROPPED = "dropped"


_AFTER: dict[Enum, tuple[Enum, ...]] = {
    TrajectoryState.PENDING: (TrajectoryState.RUNNING,),
    TrajectoryState.RUNNING: (TrajectoryState.GENERATED, TrajectoryState.IN_TOOL, TrajectoryState.INTERRUPTED),
    TrajectoryState.IN_TOOL: (TrajectoryState.RUNNING, TrajectoryState.GENERATED, TrajectoryState.INTERRUPTED),
    TrajectoryState.INTERRUPTED: (TrajectoryState.RUNNING,),
    TrajectoryState.GENERATED: (TrajectoryState.SCORED,),
    TrajectoryState.SCORED: (),
    GroupState.DEFERRED: (GroupState.IN_SERVICE, GroupState.DROPPED),
    GroupState.IN_SERVICE: (GroupState.SERVED, GroupState.DROPPED),
    GroupState.SERVED: (GroupState.SENT, GroupState.HELD, GroupState.DROPPED),
    GroupState.HELD: (GroupState.SENT, GroupState.DROPPED),
    GroupState.SENT: (),
    GroupState.DROPPED: (),
}

_BYTES_PER_TOKEN, _BYTES_PER_TRAJECTORY, _BYTES_PER_TURN, _BYTES_PER_GROUP = 9, 16, 16, 16

S = TypeVar("S", TrajectoryState, GroupState)


class IllegalTransition(AssertionError):
    """A coordinator was told something that cannot follow; a bug of ours or a message delivered twice."""


def move(name: str, before: S, after: S) -> S:
    """`after`, if it may follow `before`."""
    if after not in _AFTER[before]:
        raise IllegalTransition(f"{name}: {before.value} cannot become {after.value}")
    return after


@dataclass(slots=True)
class TrajectoryRecord:
    state: TrajectoryState = TrajectoryState.PENDING
    engine: int = -1  # of its last turn; -1 once that is lost
    turn: int = 0
    beside: int = 0  # trajectories on its engine when this turn started; 0: it was not seen to
    output_tokens: int = 0  # of its response: finished turns, and what the environment answered
    reward: float = 0.0
    prefix_tokens: int = 0  # of this turn, made by engines that were lost
    cut: bool = False  # its deadline passed
    remaining_s: float | None = None  # of its deadline, when its last turn ended or its engine was lost


@dataclass(slots=True)
class GroupRecord:
    """One group of the current rollout and its K trajectories."""

    group: GroupId
    order: int
    prompt_tokens: int
    trajectories: list[TrajectoryRecord]
    state: GroupState = GroupState.DEFERRED
    unfinished: int = field(init=False)  # trajectories still generating, or in a tool
    unscored: int = field(init=False)
    awaited: int = 0  # answers of reward and filter functions that are still to come
    surplus: bool = False  # no longer needed: dropped once nothing of it is awaited

    def __post_init__(self) -> None:
        self.unfinished = self.unscored = len(self.trajectories)

    def become(self, state: GroupState) -> None:
        self.state = move(f"group {self.group}", self.state, state)

    def trajectory(self, index: int, state: TrajectoryState) -> TrajectoryRecord:
        """Move trajectory `index` and return it."""
        record = self.trajectories[index]
        record.state = move(f"trajectory {self.group}.{index}", record.state, state)
        return record

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(t.reward for t in self.trajectories)

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of all trajectories."""
        return sum(self.prompt_tokens + t.output_tokens for t in self.trajectories)

    @property
    def channel_bytes(self) -> int:
        """What it takes on its way to the trainer, as runtime.channel.pack lays it out: a token its id, log-prob and mask; a
        trajectory two lengths, advantage and reward; a turn which tokens are of which version; the group four counts."""
        turns = sum(t.turn + 1 for t in self.trajectories)
        return (
            self.tokens * _BYTES_PER_TOKEN
            + len(self.trajectories) * _BYTES_PER_TRAJECTORY
            + turns * _BYTES_PER_TURN
            + _BYTES_PER_GROUP
        )

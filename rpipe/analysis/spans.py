"""What happened to each trajectory, group, micro-batch and step of one iteration, and when?

Times are the log's `t`: seconds since the attempt's job began. None: it did not happen, or the log does not say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_PACE_TOKENS = 4


@dataclass(slots=True)
class Tool:
    """The environment was asked about a turn. `ended_t` is None while it works."""

    asked_t: float
    ended_t: float | None = None
    answer_tokens: int = 0
    error: str = ""


@dataclass(slots=True)
class Turn:
    """One generation request. `finish` is empty while it runs, "lost" where its engine never answered."""

    engine: int
    sent_t: float
    started_t: float | None = None  # the engine's owner gave it to the engine
    first_token_t: float | None = None
    ended_t: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    prefix_tokens: int = 0  # of the turn, made by an engine that was lost; in no other output_tokens
    finish: str = ""
    tool: Tool | None = None


@dataclass(slots=True)
class Trajectory:
    group: int
    sample: int
    turns: list[Turn] = field(default_factory=list)
    score_asked_t: float | None = None
    score_started_t: float | None = None
    scored_t: float | None = None
    reward: float | None = None
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.group}.{self.sample}"

    @property
    def tokens(self) -> int:
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def generating_s(self) -> float:
        """From first tokens to last, over all turns; queues and environments are outside."""
        whole = ((turn.ended_t, turn.first_token_t) for turn in self.turns if turn.finish != "lost")
        return sum(end - first for end, first in whole if end is not None and first is not None)

    @property
    def pace_s(self) -> float | None:
        """Seconds a token after the first; None where there are too few to say."""
        turns = [turn for turn in self.turns if turn.first_token_t is not None and turn.ended_t is not None]
        made = sum(turn.output_tokens - 1 for turn in turns)
        return self.generating_s / made if made >= MIN_PACE_TOKENS else None

    @property
    def queued_s(self) -> float:
        """From SendTurn to first tokens: the engine's queue and prefill."""
        return sum(turn.first_token_t - turn.sent_t for turn in self.turns if turn.first_token_t is not None)

    @property
    def tool_s(self) -> float:
        """With the environment, waiting for a free process included."""
        tools = (turn.tool for turn in self.turns)
        return sum(tool.ended_t - tool.asked_t for tool in tools if tool is not None and tool.ended_t is not None)

    @property
    def generated_t(self) -> float | None:
        """When its last turn ended, or the environment had said that it was the last."""
        if not self.turns:
            return None
        tool = self.turns[-1].tool
        return self.turns[-1].ended_t if tool is None else tool.ended_t


@dataclass(slots=True)
class Group:
    group: int
    order: int
    requested_t: float
    prompt_tokens: int = 0
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    served_t: float | None = None  # all generated: it left the frontier
    filtered_t: float | None = None  # the filter function answered, where there is one
    sent_t: float | None = None  # all scored: to the trainer, or dropped
    dropped: str = ""  # why, where the filter refused it
    restored_tokens: tuple[int, ...] = ()  # one a trajectory, where an interrupted attempt had finished it
    rewards: tuple[float, ...] = ()
    arrived_t: float | None = None  # in the trainer's FIFO
    dispatched_t: float | None = None  # its first micro-batch was handed out
    trained_t: float | None = None  # its last micro-batch ended
    step: int | None = None

    @property
    def admitted_t(self) -> float | None:
        """When its first turn was sent: before that it was deferred."""
        return min((t.turns[0].sent_t for t in self.trajectories.values() if t.turns), default=None)

    @property
    def generated_t(self) -> float | None:
        ends = [t.generated_t for t in self.trajectories.values()]
        return max((t for t in ends if t is not None), default=None)

    def last(self) -> Trajectory | None:
        """The trajectory that the group was complete with."""
        known = [t for t in self.trajectories.values() if t.turns]
        return max(known, key=_complete_t, default=None)


def _complete_t(trajectory: Trajectory) -> tuple[float, int]:
    for t in (trajectory.scored_t, trajectory.generated_t):
        if t is not None:
            return t, trajectory.sample
    return float("inf"), trajectory.sample  # still running: the one that is waited for


@dataclass(slots=True)
class MicroBatch:
    number: int
    replica: int
    step: int
    dispatched_t: float
    tokens: int
    slices: tuple[tuple[int, tuple[int, ...]], ...]  # (group, its samples)
    started_t: float | None = None
    ended_t: float | None = None


@dataclass(slots=True)
class Step:
    step: int
    begun_t: float | None = None
    filled_t: float | None = None  # all its micro-batches done
    groups: tuple[int, ...] = ()
    started_t: float | None = None  # of reduction and optimizer
    ended_t: float | None = None
    skipped: bool = False
    loss: float | None = None
    grad_norm: float | None = None


@dataclass(slots=True)
class Publish:
    """`engines`: when each began to take the weights, and when it held them."""

    version: int
    started_t: float
    ended_t: float
    nbytes: int = 0
    engines: dict[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(slots=True)
class Detail:
    """One rollout and what was trained on it. For an evaluation (`purpose` "eval") the training half stays empty."""

    iteration: int
    purpose: str = "train"
    version: int | None = None
    requested_t: float | None = None
    rollout_ended_t: float | None = None
    groups: dict[int, Group] = field(default_factory=dict)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)
    publish: Publish | None = None  # of the weights that it trained
    next_t: float | None = None  # the next rollout was requested: this iteration's cycle is over
    replicas: int = 1

    @property
    def train_ended_t(self) -> float | None:
        return max((s.ended_t for s in self.steps.values() if s.ended_t is not None), default=None)

    @property
    def ended_t(self) -> float | None:
        """The last thing known of it."""
        last = [self.rollout_ended_t, self.train_ended_t, self.publish.ended_t if self.publish else None]
        return max((t for t in last if t is not None), default=None)

    def trajectories(self) -> list[Trajectory]:
        return [t for group in self.groups.values() for t in group.trajectories.values()]

    def step_index(self) -> dict[int, int]:
        """Step of the run -> its place in the iteration, from 0."""
        return {step: index for index, step in enumerate(sorted(self.steps))}


def tool_calls(at: Detail) -> list[tuple[float, float, Turn, Trajectory]]:
    """(asked, answered, turn, trajectory) of every call of the environment, sorted by start."""
    calls = [
        (turn.tool.asked_t, turn.tool.ended_t, turn, t)
        for t in at.trajectories()
        for turn in t.turns
        if turn.tool is not None and turn.tool.ended_t is not None
    ]
    return sorted(calls, key=lambda call: (call[0], call[3].group, call[3].sample))


@dataclass(slots=True)
class Outage:
    """An engine that was lost. `turns` ran on it and went on elsewhere, `kept_tokens` of them were not made again."""

    engine: int
    lost_t: float
    reason: str
    turns: int = 0
    kept_tokens: int = 0
    restarted_t: float | None = None


@dataclass(slots=True)
class Mark:
    """Something worth a line on the timeline: an engine lost, a kind that this version does not know."""

    t: float
    rank: int
    kind: str
    text: str


@dataclass(slots=True)
class Track:
    """What of an attempt belongs to no single iteration."""

    simulated: str = ""  # on which hardware, where this is no real run
    calibrated: bool | None = None  # whether that was fitted to real runs of this model; None: a real run, or an older log
    unix_s: float | None = None  # wall clock at t = 0, where the log says it
    ready_t: float | None = None  # all training ranks stood
    warm_up: tuple[float, float] | None = None
    ended_t: float = 0.0  # the last record
    checkpoints: list[tuple[float, float, int]] = field(default_factory=list)  # started, ended, iteration
    publishes: list[Publish] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    marked: dict[str, int] = field(default_factory=dict)  # kind -> how many, those that were not kept included
    hosts: dict[int, str] = field(default_factory=dict)

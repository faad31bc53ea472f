"""What can happen, and what can be asked for?

Two coordinators, each a state machine `on(event) -> list[Command]`. Everything they see is an event below and everything
they want done is a command below; both are immutable, typed, and go to the event log as they are (`kind` names the
type). `t` is seconds since the job's start, on the rollout coordinator's clock. Payloads (token ids, tensors) stay with the
drivers; here are ids, counts and times only.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from rpipe.core.types import GroupId, TrajectoryId, Version

Purpose = Literal["train", "eval"]
Finish = Literal["stop", "length", "deadline", "abort"]


class Event(Struct, frozen=True, tag_field="kind", tag=True, kw_only=True):
    t: float


class Command(Struct, frozen=True, tag_field="kind", tag=True, kw_only=True):
    pass


class GroupSpec(Struct, frozen=True):
    """What the coordinator needs to know of a prompt; the driver keeps its tokens under `group`. Of a group that an
    interrupted attempt had finished, also what came of it, one entry a trajectory (`output_tokens`: of its whole response,
    the environment's answers too; `finishes`: stop, length or deadline, of its last turn; `turns`: how many it took)."""

    group: GroupId
    prompt_tokens: int
    output_tokens: tuple[int, ...] = ()
    rewards: tuple[float, ...] = ()
    finishes: tuple[str, ...] = ()
    turns: tuple[int, ...] = ()


# ---- rollout coordinator: events ------------------------------------------------------------------------------------


class RolloutRequested(Event, frozen=True):
    """The driver drew these groups, in submission order. `version` is the only one they may be sampled under."""

    iteration: int
    version: Version
    purpose: Purpose
    trajectories_per_group: int
    groups: tuple[GroupSpec, ...]


class GroupsDrawn(Event, frozen=True):
    """More groups of the running rollout, as RequestGroups asked; submission order goes on."""

    iteration: int
    groups: tuple[GroupSpec, ...]


class EngineReady(Event, frozen=True):
    """The engine answers. Its KV cache holds so many tokens."""

    engine: int
    kv_tokens: int


class TurnStarted(Event, frozen=True):
    """The engine's first tokens of a turn came: its deadline counts from here, not from its time in the engine's queue."""

    trajectory: TrajectoryId
    engine: int


class TurnFinished(Event, frozen=True):
    """An engine answered. Times are the engine owner's, on the job's clock. `output_tokens`: of this turn, with what a lost
    engine had made of it."""

    trajectory: TrajectoryId
    engine: int
    output_tokens: int
    cached_tokens: int
    finish: Finish
    started_t: float
    first_token_t: float
    version: Version


class ToolFinished(Event, frozen=True):
    """The environment answered a turn; `started_t`: when it was asked. `done`: there is no next turn. `error` is empty, or why
    it gave no answer (the trajectory is then done)."""

    trajectory: TrajectoryId
    turn: int
    observation_tokens: int
    done: bool
    started_t: float
    error: str = ""


class TrajectoryScored(Event, frozen=True):
    """`error` is empty, or why the reward function gave no score (`reward` is then 0)."""

    trajectory: TrajectoryId
    reward: float
    started_t: float
    error: str = ""


class GroupFiltered(Event, frozen=True):
    """The filter function's answer. `error`: why it gave none; the group is then kept."""

    group: GroupId
    keep: bool
    started_t: float
    error: str = ""


class StepTrained(Event, frozen=True):
    """The trainer finished a step of so many groups. `busy_s`: its computing, micro-batches (mean over replicas) and step."""

    iteration: int
    step: int
    groups: int
    busy_s: float


class GroupReceived(Event, frozen=True):
    """The trainer holds the group's tensors; their host memory here may go."""

    group: GroupId


class WeightsOffered(Event, frozen=True):
    """The trainer will broadcast `version`; every engine that lives takes part."""

    version: Version


class EngineUpdated(Event, frozen=True):
    """This engine now holds `version` and its prefix cache is empty."""

    engine: int
    version: Version
    started_t: float


class Prefix(Struct, frozen=True):
    """What a lost engine had made of a response; its tokens are kept."""

    trajectory: TrajectoryId
    output_tokens: int


class EngineLost(Event, frozen=True):
    """It died or fell silent. `prefixes` tells of the turns that ran on it; those not in there had made nothing."""

    engine: int
    reason: str
    prefixes: tuple[Prefix, ...] = ()


class EngineRestarted(Event, frozen=True):
    """It can generate again, from the snapshot of `version`, and its prefix cache is empty."""

    engine: int
    version: Version
    started_t: float


class DeadlinePassed(Event, frozen=True):
    """The clock went past `next_deadline_t`."""


class StopRequested(Event, frozen=True):
    """To both coordinators: end at the next point where nothing computed is lost. To rollout it comes from the trainer."""

    reason: str


# ---- rollout coordinator: commands ----------------------------------------------------------------------------------


class UpdateEngine(Command, frozen=True):
    """Join the broadcast of `version`, then drop the prefix cache."""

    engine: int
    version: Version


class SendTurn(Command, frozen=True):
    """Generate turn `turn`, from 0. Higher `priority` goes first in the engine's queue. `history_tokens`: earlier turns and
    what the environment answered to them. With `prefix_tokens` the turn goes on where a lost engine left it."""

    trajectory: TrajectoryId
    engine: int
    priority: int
    version: Version
    prefix_tokens: int = 0
    turn: int = 0
    history_tokens: int = 0


class RunTool(Command, frozen=True):
    """Ask the environment what it answers to this turn."""

    trajectory: TrajectoryId
    turn: int


class AbortTurn(Command, frozen=True):
    """Stop generating; what there is comes back as a TurnFinished with finish "abort"."""

    trajectory: TrajectoryId
    engine: int


class ScoreTrajectory(Command, frozen=True):
    trajectory: TrajectoryId


class FilterGroup(Command, frozen=True):
    """All its rewards are in: ask the filter function."""

    group: GroupId


class ServingComplete(Command, frozen=True):
    """All K trajectories stopped generating: the group leaves the frontier (RolloutPipe's first signal)."""

    group: GroupId


class SendGroup(Command, frozen=True):
    """Trainable-complete (RolloutPipe's second signal): rewards are in, advantages are known, to the trainer's FIFO."""

    group: GroupId
    order: int  # submission order within the iteration
    iteration: int
    version: Version
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]


class DropGroup(Command, frozen=True):
    """The trainer never sees it: the filter refused it, or (reason "surplus", no rewards) enough others were kept."""

    group: GroupId
    order: int
    iteration: int
    rewards: tuple[float, ...]
    reason: str


class EndRollout(Command, frozen=True):
    """Every group of this iteration was sent or dropped. Goes to the trainer after the last SendGroup."""

    iteration: int
    version: Version
    groups_sent: int
    groups_dropped: int


class EndEvaluation(Command, frozen=True):
    """Every held-out trajectory was scored."""

    iteration: int
    version: Version
    count: int
    reward_mean: float


class ConfirmWeights(Command, frozen=True):
    """Every engine holds `version`: tell the trainer."""

    version: Version


class RequestRollout(Command, frozen=True):
    """All engines hold `version`: draw the prompts of this evaluation or iteration, then send RolloutRequested."""

    iteration: int
    version: Version
    purpose: Purpose


class RestartEngine(Command, frozen=True):
    """Start it from the newest snapshot, of `version` or later, before any request; -1 is what the run began from."""

    engine: int
    version: Version


class GiveUp(Command, frozen=True):
    """The run cannot go on; `reason` is for a person."""

    reason: str


class RequestGroups(Command, frozen=True):
    """Draw so many more prompts for the running rollout, then send GroupsDrawn."""

    iteration: int
    version: Version
    count: int


class FinishRun(Command, frozen=True):
    """Nothing is left to do: close engines and leave. `reason` is empty at a normal end."""

    reason: str = ""


# ---- training coordinator: events -----------------------------------------------------------------------------------


class TrainerReady(Event, frozen=True):
    """All training ranks stand, with weights of `version`; `iteration` is the next to train."""

    iteration: int
    version: Version
    replicas: int  # data-parallel
    stages: int = 1  # of the pipeline in each


class GroupArrived(Event, frozen=True):
    """A complete group's tensors are here. `tokens[i]` counts prompt and response of trajectory i."""

    group: GroupId
    order: int
    iteration: int
    version: Version
    tokens: tuple[int, ...]
    nbytes: int


class GroupDropped(Event, frozen=True):
    """What DropGroup said, seen by the trainer: exact mode does not wait for this submission order."""

    group: GroupId
    order: int
    iteration: int


class RolloutEnded(Event, frozen=True):
    """What EndRollout said, seen by the trainer."""

    iteration: int
    version: Version
    groups_sent: int
    groups_dropped: int


class MicroBatchDone(Event, frozen=True):
    """Forward and backward of one micro-batch, on all ranks of one data-parallel replica."""

    replica: int
    micro_batch: int
    started_t: float
    ended_t: float  # by the replica; `t` is later where the coordinator was itself computing
    trajectories: int
    tokens: int


class StepDone(Event, frozen=True):
    """Gradients reduced, scaled, clipped and applied (or skipped: not finite). Means are over the step's trained
    tokens; None where a figure was not finite."""

    step: int
    started_t: float
    skipped: bool
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    entropy: float | None
    clip_fraction: float | None
    kl: float | None
    logprob_gap_mean: (
        float | None
    )  # |engine - trainer|; meaningful on an iteration's first step, when both hold the same weights
    logprob_gap_max: float | None
    trained_tokens: int


class WeightsPublished(Event, frozen=True):
    """What ConfirmWeights said, seen by the trainer."""

    version: Version
    started_t: float
    nbytes: int


class CheckpointSaved(Event, frozen=True):
    iteration: int
    started_t: float
    path: str


# ---- training coordinator: commands ---------------------------------------------------------------------------------


class Slice(Struct, frozen=True):
    """Some trajectories of one group."""

    group: GroupId
    samples: tuple[int, ...]


class BeginStep(Command, frozen=True):
    """Zero the gradient buffers on every rank."""

    step: int
    iteration: int


class TrainMicroBatch(Command, frozen=True):
    """Forward and backward on one data-parallel replica; gradients add up, nothing is scaled or reduced. A pipeline takes
    several at once: `cuts` counts the trajectories of each, empty where there is one."""

    micro_batch: int
    replica: int
    step: int
    slices: tuple[Slice, ...]
    tokens: int
    cuts: tuple[int, ...] = ()


class FinishStep(Command, frozen=True):
    """All its groups were consumed: reduce, divide once by the step's own denominator, clip, step."""

    step: int
    iteration: int
    groups: tuple[GroupId, ...]


class PublishWeights(Command, frozen=True):
    version: Version


class SaveCheckpoint(Command, frozen=True):
    """State after `iteration` iterations were trained."""

    iteration: int
    version: Version


class StopTraining(Command, frozen=True):
    """Nothing is left to do; `reason` is empty at a normal end."""

    reason: str = ""


RolloutEvent = (
    RolloutRequested
    | GroupsDrawn
    | EngineReady
    | TurnStarted
    | TurnFinished
    | ToolFinished
    | TrajectoryScored
    | GroupFiltered
    | StepTrained
    | GroupReceived
    | WeightsOffered
    | EngineUpdated
    | EngineLost
    | EngineRestarted
    | DeadlinePassed
    | StopRequested
)
TrainingEvent = (
    StopRequested
    | TrainerReady
    | GroupArrived
    | GroupDropped
    | RolloutEnded
    | MicroBatchDone
    | StepDone
    | WeightsPublished
    | CheckpointSaved
)
RolloutCommand = (
    UpdateEngine
    | SendTurn
    | RunTool
    | AbortTurn
    | ScoreTrajectory
    | FilterGroup
    | ServingComplete
    | SendGroup
    | DropGroup
    | EndRollout
    | EndEvaluation
    | ConfirmWeights
    | RequestRollout
    | RestartEngine
    | GiveUp
    | RequestGroups
    | FinishRun
)
TrainingCommand = BeginStep | TrainMicroBatch | FinishStep | PublishWeights | SaveCheckpoint | StopTraining
AnyEvent = RolloutEvent | TrainingEvent
AnyCommand = RolloutCommand | TrainingCommand

"""What can happen, and what can be asked for?

Two coordinators, each a state machine `on(event) -> list[Command]`. Everything they see is an event below and everything
they want done is a command below; both are immutable, typed, and go to the event log as they are (`kind` names the
type). `t` is seconds since the job's start, on the rollout coordinator's clock. Payloads (token ids, tensors) stay with the drivers;
here are ids, counts and times only.
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
    """What the coordinator needs to know of a prompt; the driver keeps its tokens under `group`."""

    group: GroupId
    prompt_tokens: int


# ---- rollout coordinator: events ------------------------------------------------------------------------------------


class RolloutRequested(Event):
    """The driver drew these groups, in submission order. `version` is the only one they may be sampled under."""

    iteration: int
    version: Version
    purpose: Purpose
    trajectories_per_group: int
    groups: tuple[GroupSpec, ...]


class TurnFinished(Event):
    """An engine answered. Times are the engine owner's, on the job's clock."""

    trajectory: TrajectoryId
    engine: int
    output_tokens: int
    cached_tokens: int
    finish: Finish
    started_t: float
    first_token_t: float
    version: Version


class TrajectoryScored(Event):
    """`error` is empty, or why the reward function gave no score (`reward` is then 0)."""

    trajectory: TrajectoryId
    reward: float
    started_t: float
    error: str = ""


class GroupReceived(Event):
    """The trainer holds the group's tensors; their host memory here may go."""

    group: GroupId


class WeightsOffered(Event):
    """The trainer will broadcast `version`; every engine must join."""

    version: Version


class EngineUpdated(Event):
    """This engine now holds `version` and its prefix cache is empty. The first one also says that it is up."""

    engine: int
    version: Version
    started_t: float


class DeadlinePassed(Event):
    """The clock went past `next_deadline_t`."""


# ---- rollout coordinator: commands ----------------------------------------------------------------------------------


class UpdateEngine(Command):
    """Join the broadcast of `version`, then drop the prefix cache."""

    engine: int
    version: Version


class SendTurn(Command):
    """Generate. Higher `priority` goes first in the engine's queue."""

    trajectory: TrajectoryId
    engine: int
    priority: int
    version: Version


class AbortTurn(Command):
    """Stop generating; what there is comes back as a TurnFinished with finish "abort"."""

    trajectory: TrajectoryId
    engine: int


class ScoreTrajectory(Command):
    trajectory: TrajectoryId


class ServingComplete(Command):
    """All K trajectories stopped generating: the group leaves the frontier (RolloutPipe's first signal)."""

    group: GroupId


class SendGroup(Command):
    """Trainable-complete (RolloutPipe's second signal): rewards are in, advantages are known, to the trainer's FIFO."""

    group: GroupId
    order: int  # submission order within the iteration
    iteration: int
    version: Version
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]


class DropGroup(Command):
    """The filter refused the group; the trainer never sees it."""

    group: GroupId
    order: int
    iteration: int
    rewards: tuple[float, ...]
    reason: str


class EndRollout(Command):
    """Every group of this iteration was sent or dropped. Goes to the trainer after the last SendGroup."""

    iteration: int
    version: Version
    groups_sent: int
    groups_dropped: int


class EndEvaluation(Command):
    """Every held-out trajectory was scored."""

    iteration: int
    version: Version
    count: int
    reward_mean: float


class RequestRollout(Command):
    """All engines hold `version`: draw the prompts of this evaluation or iteration, then send RolloutRequested."""

    iteration: int
    version: Version
    purpose: Purpose


class FinishRun(Command):
    """Nothing is left to do: close engines and leave."""


# ---- training coordinator: events -----------------------------------------------------------------------------------


class TrainerReady(Event):
    """All training ranks stand, with weights of `version`; `iteration` is the next to train."""

    iteration: int
    version: Version


class GroupArrived(Event):
    """A complete group's tensors are here. `tokens[i]` counts prompt and response of trajectory i."""

    group: GroupId
    order: int
    iteration: int
    version: Version
    tokens: tuple[int, ...]
    nbytes: int


class RolloutEnded(Event):
    """What EndRollout said, seen by the trainer."""

    iteration: int
    version: Version
    groups_sent: int
    groups_dropped: int


class MicroBatchDone(Event):
    """Forward and backward of one micro-batch, on all ranks of one data-parallel replica."""

    replica: int
    micro_batch: int
    started_t: float
    ended_t: float  # by the replica; `t` is later where the coordinator was itself computing
    trajectories: int
    tokens: int


class StepDone(Event):
    """Gradients reduced, scaled, clipped and applied (or skipped: not finite). Means are over the step's trained tokens."""

    step: int
    started_t: float
    skipped: bool
    loss: float
    grad_norm: float
    learning_rate: float
    entropy: float
    clip_fraction: float
    kl: float
    logprob_gap_mean: float  # |engine - trainer|; meaningful on an iteration's first step, when both hold the same weights
    logprob_gap_max: float
    trained_tokens: int


class WeightsPublished(Event):
    """Every engine holds `version`."""

    version: Version
    started_t: float
    nbytes: int


class CheckpointSaved(Event):
    iteration: int
    started_t: float
    path: str


# ---- training coordinator: commands ---------------------------------------------------------------------------------


class Slice(Struct, frozen=True):
    """Some trajectories of one group."""

    group: GroupId
    indices: tuple[int, ...]


class BeginStep(Command):
    """Zero the gradient buffers on every rank."""

    step: int
    iteration: int


class TrainMicroBatch(Command):
    """Forward and backward on one data-parallel replica; gradients add up, nothing is scaled or reduced."""

    micro_batch: int
    replica: int
    step: int
    slices: tuple[Slice, ...]
    tokens: int


class FinishStep(Command):
    """All its groups were consumed: reduce, divide once by the step's own denominator, clip, step."""

    step: int
    iteration: int
    groups: tuple[GroupId, ...]


class PublishWeights(Command):
    version: Version


class SaveCheckpoint(Command):
    """State after `iteration` iterations were trained."""

    iteration: int
    version: Version


class StopTraining(Command):
    """Nothing is left to do; `reason` is empty at a normal end."""

    reason: str = ""


RolloutEvent = RolloutRequested | TurnFinished | TrajectoryScored | GroupReceived | WeightsOffered | EngineUpdated | DeadlinePassed
TrainingEvent = TrainerReady | GroupArrived | RolloutEnded | MicroBatchDone | StepDone | WeightsPublished | CheckpointSaved
RolloutCommand = (
    UpdateEngine | SendTurn | AbortTurn | ScoreTrajectory | ServingComplete | SendGroup | DropGroup | EndRollout | EndEvaluation
    | RequestRollout | FinishRun
)
TrainingCommand = BeginStep | TrainMicroBatch | FinishStep | PublishWeights | SaveCheckpoint | StopTraining
AnyEvent = RolloutEvent | TrainingEvent
AnyCommand = RolloutCommand | TrainingCommand

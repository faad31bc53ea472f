"""What do ranks say to each other over MPI?

Small typed records in msgpack; tensors travel elsewhere (runtime.channel). Who says what to whom:

    rollout coordinator  -> engine owner          Join, StartTurn, CancelTurn, LoadWeights, Condemn, Restart, CloseEngine
    engine owner         -> rollout coordinator   EngineUp, TurnBegan, TurnDone, WeightsLoaded, EngineDown, EngineBack,
                                                  EngineFailed
    rollout coordinator  -> training coordinator  EnginesUp, GroupHeader, Dropped, Ended, Takers, Confirmed
    training coordinator -> rollout coordinator   Standing, Offer, Join, Published, Ready, Received, TrainerState,
                                                  StepReport, Stop
    training coordinator -> training ranks        Work
    training ranks       -> training coordinator  BatchDone
    coordinators         -> each other, their ranks   Alive
"""

from __future__ import annotations

from msgspec import Struct

from rpipe.core.events import (
    BeginStep,
    EngineLost,
    EngineRestarted,
    EngineUpdated,
    FinishStep,
    MicroBatchDone,
    PublishWeights,
    SaveCheckpoint,
    SendTurn,
    StepDone,
    StopTraining,
    TrainMicroBatch,
    TurnFinished,
    TurnStarted,
)
from rpipe.core.types import GroupId, TrajectoryId, Version


class Message(Struct, frozen=True, tag=True):
    pass


class TensorEntry(Struct, frozen=True):
    """One weight of the broadcast: Hugging Face name, dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Alive(Message, frozen=True):
    """Nothing new, but the sender works; every limits.heartbeat_s."""


# ---- rollout coordinator and engine owners


class Join(Message, frozen=True):
    """To one engine: meet the trainer in an update group of your own. Its rank 0 listens at address:port; buckets in the order
    in which they will come. `life` counts an engine's starts: what is meant for an earlier one is not done."""

    engine: int
    life: int
    group: str
    address: str
    port: int
    world_size: int
    backend: str
    buckets: tuple[tuple[TensorEntry, ...], ...]


class StartTurn(Message, frozen=True):
    life: int
    command: SendTurn
    token_ids: bytes  # int32; the prompt, then what there is of the response
    temperature: float
    max_new_tokens: int


class CancelTurn(Message, frozen=True):
    trajectory: TrajectoryId


class LoadWeights(Message, frozen=True):
    life: int
    version: Version


class Condemn(Message, frozen=True):
    """The trainer could not reach the engine: take it for lost."""

    life: int
    reason: str


class Restart(Message, frozen=True):
    """Start the engine from the newest snapshot, of `version` or later; -1 is what the run began from."""

    life: int
    version: Version


class CloseEngine(Message, frozen=True):
    pass


class EngineUp(Message, frozen=True):
    engine: int
    seconds: float
    kv_tokens: int  # that its cache holds


class TurnBegan(Message, frozen=True):
    event: TurnStarted


class TurnDone(Message, frozen=True):
    """`versions` holds (start, end, version) of the response's tokens."""

    event: TurnFinished
    output_ids: bytes  # int32
    logprobs: bytes  # float32
    versions: tuple[tuple[int, int, int], ...]


class WeightsLoaded(Message, frozen=True):
    event: EngineUpdated


class Partial(Struct, frozen=True):
    """What a lost engine had made of a response; fields as in TurnDone."""

    trajectory: TrajectoryId
    output_ids: bytes
    logprobs: bytes
    versions: tuple[tuple[int, int, int], ...]


class EngineDown(Message, frozen=True):
    life: int
    event: EngineLost
    partials: tuple[Partial, ...]


class EngineBack(Message, frozen=True):
    life: int
    event: EngineRestarted


class EngineFailed(Message, frozen=True):
    """What no restart mends."""

    engine: int
    reason: str


# ---- between the coordinators


class EnginesUp(Message, frozen=True):
    """Every engine answers."""


class Standing(Message, frozen=True):
    """The trainer stands ready to publish."""

    iteration: int  # the next to train
    cursor: int  # prompts drawn so far


class GroupHeader(Message, frozen=True):
    """A group is complete and on its way; over a device's channel it waits on the rollout side's host for Ready."""

    group: GroupId
    order: int
    iteration: int
    version: Version
    tokens: tuple[int, ...]
    nbytes: int


class Dropped(Message, frozen=True):
    group: GroupId
    order: int
    iteration: int


class Ended(Message, frozen=True):
    iteration: int
    version: Version
    groups_sent: int
    groups_dropped: int
    cursor: int  # for the checkpoint


class Takers(Message, frozen=True):
    """Who takes the weights that were offered: (engine, life) of each."""

    version: Version
    engines: tuple[tuple[int, int], ...]


class Published(Message, frozen=True):
    """The trainer's part is done. `fingerprint` tells these weights from any others; `failed`: engines that could not be
    reached, with their life and the reason."""

    version: Version
    fingerprint: str
    failed: tuple[tuple[int, int, str], ...]


class Confirmed(Message, frozen=True):
    version: Version


class Offer(Message, frozen=True):
    version: Version


class Ready(Message, frozen=True):
    """The trainer receives this group now: its tensor may go. Only where the channel is not patient (runtime/channel.py)."""

    group: GroupId


class Received(Message, frozen=True):
    group: GroupId


class TrainerState(Message, frozen=True):
    """For the progress display."""

    busy: bool
    text: str
    groups_consumed: int


class StepReport(Message, frozen=True):
    """For the scalars. `busy_s`: forward and backward of the step's micro-batches, mean over replicas, and the step itself."""

    iteration: int
    event: StepDone
    groups: int
    busy_s: float


class Stop(Message, frozen=True):
    reason: str


# ---- training coordinator and ranks


class Work(Message, frozen=True):
    """Do this next; a micro-batch's tensor follows on the channel (`nbytes`) and says what is in it, `slices` being empty:
    a message stays so small that MPI sends it at once, whatever the receiver does."""

    command: BeginStep | TrainMicroBatch | FinishStep | PublishWeights | SaveCheckpoint | StopTraining
    nbytes: int = 0
    cursor: int = 0  # with SaveCheckpoint


class BatchDone(Message, frozen=True):
    event: MicroBatchDone


AnyMessage = (
    Alive
    | Join
    | StartTurn
    | CancelTurn
    | LoadWeights
    | Condemn
    | Restart
    | CloseEngine
    | EngineUp
    | TurnBegan
    | TurnDone
    | WeightsLoaded
    | EngineDown
    | EngineBack
    | EngineFailed
    | EnginesUp
    | Standing
    | Takers
    | Published
    | GroupHeader
    | Dropped
    | Ended
    | Confirmed
    | Offer
    | Ready
    | Received
    | TrainerState
    | StepReport
    | Stop
    | Work
    | BatchDone
)

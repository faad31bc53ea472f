"""The training coordinator: from groups in the FIFO to optimizer steps and published weights.

    TrainerReady         -> PublishWeights (also at the start: every engine proves that it can be reached)
    WeightsPublished     -> SaveCheckpoint if due; the last version -> StopTraining
    GroupArrived         -> BeginStep, TrainMicroBatch ... as soon as the mode allows
    MicroBatchDone       -> more for a replica that pulls; all of the step's done -> FinishStep
    StepDone             -> the next step; all groups consumed -> PublishWeights(v + 1)

Modes choose only *when* a group may be consumed and *in which order*:

    serial   after RolloutEnded, by submission order     (the baseline: finish the rollout, then train)
    exact    on arrival, by submission order             (same steps, owners and packing as serial: the same bits)
    fifo     on arrival, by arrival order; replicas pull

A step is U complete groups; the last one of an iteration is shorter where groups were dropped. A state machine without
IO, as control.rollout is.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from rpipe.control.rollout import OffPolicy
from rpipe.core.events import (
    BeginStep,
    CheckpointSaved,
    FinishStep,
    GroupArrived,
    GroupDropped,
    MicroBatchDone,
    PublishWeights,
    RolloutEnded,
    SaveCheckpoint,
    Slice,
    StepDone,
    StopRequested,
    StopTraining,
    TrainerReady,
    TrainingCommand,
    TrainingEvent,
    TrainMicroBatch,
    WeightsPublished,
)
from rpipe.core.types import GroupId, Version
from rpipe.policy.batching import Call, Item, at_once, calls, feasible, owners

AHEAD = 2  # calls a replica may hold: one it works on and one that is already there


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    mode: Literal["serial", "fifo", "exact"]
    span_groups: bool  # training.packing = global
    groups_per_step: int  # U
    replicas: int
    micro_batch_tokens: int  # of each of the peers
    iterations: int
    checkpoint_every_iterations: int = 0  # 0: only at the end
    stop_after_skipped_steps: int = 3
    pipeline_stages: int = 1
    peers: int = 1  # data-parallel ranks that share a micro-batch: training.ep


@dataclass(slots=True)
class Step:
    """The optimizer step that is being accumulated."""

    groups: list[GroupId] = field(default_factory=list)  # whose trajectories were taken in
    queues: list[list[Call]] = field(default_factory=list)  # what was cut: one for all in fifo, else one each
    waiting: deque[Item] = field(default_factory=deque)  # fifo with global packing: cut when a replica is free
    held: list[int] = field(default_factory=list)  # TrainMicroBatches on each replica
    closed: bool = False  # no group will join
    finishing: bool = False


class TrainingCoordinator:
    """`on(event)` returns what must be done, in order. Raises AssertionError where the events cannot be true."""

    def __init__(self, settings: TrainingSettings) -> None:
        self.settings = settings
        self.done = False
        self.iteration = -1
        self.version: Version = -1
        self.steps_done = 0  # of this attempt
        self.groups_consumed = 0  # of this iteration
        self._fifo: list[GroupArrived] = []  # in the order in which they will be consumed
        self._dropped_orders: set[int] = set()
        self._next_order = 0  # exact: of the next group to consume
        self._ended: RolloutEnded | None = None
        self._step: Step | None = None
        self._micro_batches = 0
        self._skipped_in_row = 0
        self._steps_this_iteration = 0
        self._stop: str | None = None
        self._saved_version: Version = -1  # newest checkpoint's, saved or being saved
        self._saving = False

    def on(self, event: TrainingEvent) -> list[TrainingCommand]:
        if self.done:
            return []
        match event:
            case GroupArrived():
                self._arrived(event)
            case GroupDropped():
                self._current(event.iteration, event.group)
                self._dropped_orders.add(event.order)
            case RolloutEnded():
                self._ended = event
            case MicroBatchDone():
                assert self._step is not None
                self._step.held[event.replica] -= 1
            case StepDone():
                return self._step_done(event)
            case TrainerReady():
                self.iteration, self.version = event.iteration, event.version
                self._saved_version = event.version if event.iteration else -1
                self.steps_done = 0
                return [PublishWeights(version=event.version)]
            case WeightsPublished():
                return self._published(event)
            case CheckpointSaved():
                return self._saved()
            case StopRequested():
                return self._stop_requested(event)
        return self._advance()

    @property
    def step_groups(self) -> tuple[GroupId, ...]:
        """Whose trajectories the present step has taken in; in serial mode all of its groups, from its begin."""
        return tuple(self._step.groups) if self._step is not None else ()

    def waiting_for(self) -> str:
        """What training waits for, in the user's words; empty while it works."""
        if self._step is not None and (self._step.finishing or any(self._step.held)):
            return ""
        if self._ended is None:
            if self.settings.mode == "serial":
                return f"the end of rollout {self.iteration}"
            if self.settings.mode == "exact":
                return f"group {self._next_order} of iteration {self.iteration}"
        return "the next group"

    # ---- groups in

    def _current(self, iteration: int, group: GroupId) -> None:
        if iteration != self.iteration:
            raise OffPolicy(f"group {group} is of iteration {iteration}; the trainer is at {self.iteration}")

    def _arrived(self, event: GroupArrived) -> None:
        self._current(event.iteration, event.group)
        if event.version != self.version:
            raise OffPolicy(
                f"group {event.group} was sampled under version {event.version}; the trainer publishes {self.version}"
            )
        if self.settings.mode == "fifo":
            self._fifo.append(event)
        else:
            insort(self._fifo, event, key=lambda g: g.order)

    def _consumable(self) -> GroupArrived | None:
        """The next group, if the mode lets it be consumed now."""
        if not self._fifo:
            return None
        if self.settings.mode == "serial" and not self._all_arrived():
            return None
        if self.settings.mode == "exact":
            while self._next_order in self._dropped_orders:
                self._next_order += 1
            if self._fifo[0].order != self._next_order:
                return None
        self._next_order += 1
        return self._fifo.pop(0)

    def _all_arrived(self) -> bool:
        return self._ended is not None and self.groups_consumed + len(self._fifo) == self._ended.groups_sent

    # ---- the step

    def _advance(self) -> list[TrainingCommand]:
        commands: list[TrainingCommand] = []
        step = self._step
        if self._stop is not None and self._saving and self._between_steps:
            return commands  # the run ends with this checkpoint: what would begin now would be lost
        if step is None or not step.closed:
            taken: list[Item] = []
            while (group := self._open_step_group()) is not None:
                if self._step is None:
                    queues = 1 if self.settings.mode == "fifo" else self.settings.replicas
                    self._step = Step(queues=[[] for _ in range(queues)], held=[0] * self.settings.replicas)
                    commands.append(BeginStep(step=self.steps_done, iteration=self.iteration))
                taken += self._take_in(self._step, group)
            step = self._step
            if step is None:
                return [*commands, *self._end_iteration()]
            nothing_follows = self._all_arrived() and not self._fifo
            step.closed = len(step.groups) == self.settings.groups_per_step or nothing_follows
            if self._spans_as_it_comes:
                step.waiting += taken
            else:
                self._cut(step, taken)
        commands += self._pull_spanning(step) if self._spans_as_it_comes else self._pull(step)
        if step.closed and not step.finishing and not step.waiting and not any(step.queues) and not any(step.held):
            step.finishing = True
            commands.append(FinishStep(step=self.steps_done, iteration=self.iteration, groups=tuple(step.groups)))
        return commands

    def _open_step_group(self) -> GroupArrived | None:
        full = self._step is not None and len(self._step.groups) == self.settings.groups_per_step
        return None if full else self._consumable()

    def _take_in(self, step: Step, group: GroupArrived) -> list[Item]:
        step.groups.append(group.group)
        self.groups_consumed += 1
        return [Item(group.group, index, tokens) for index, tokens in enumerate(group.tokens)]

    def _cut(self, step: Step, items: list[Item]) -> None:
        """Into balanced shares, one a replica, and their calls; by group, unless packing is global.

        Exact and serial: share r is replica r's, so that owners and packing depend on the trajectories alone.
        """
        units = (
            [items] if self.settings.span_groups else [list(unit) for _, unit in groupby(items, key=lambda item: item.group)]
        )
        for unit in units:
            for replica, share in enumerate(owners(unit, self.settings.replicas)):
                step.queues[replica % len(step.queues)] += self._calls(share)

    def _calls(self, share: list[Item]) -> list[Call]:
        return calls(share, self.settings.micro_batch_tokens, self.settings.pipeline_stages, self.settings.peers)

    def _pull(self, step: Step) -> list[TrainingCommand]:
        """Whoever has room takes the next call of its queue, and the ones behind it until they fill a pipeline."""
        commands: list[TrainingCommand] = []
        if not any(step.queues):
            return commands
        full = at_once(self.settings.pipeline_stages)
        for _ in range(AHEAD):
            replicas = sorted(range(self.settings.replicas), key=lambda r: (step.held[r], r))
            taken: dict[int, Call] = {replica: [] for replica in replicas if step.held[replica] < AHEAD}
            dealt = True
            while dealt:  # in turn: of a queue for all nobody takes what another could begin with
                dealt = False
                for replica, call in taken.items():
                    queue = step.queues[replica % len(step.queues)]
                    if queue and len(call) < full:
                        call.extend(queue.pop(0))
                        dealt = True
            commands += [self._call(step, replica, call) for replica, call in taken.items() if call]
        return commands

    @property
    def _spans_as_it_comes(self) -> bool:
        return self.settings.mode == "fifo" and self.settings.span_groups

    def _pull_spanning(self, step: Step) -> list[TrainingCommand]:
        """The feasible batch of whole groups, its trajectories balanced over the idle replicas, each in micro-batches up to the
        token budget.

        A busy replica gets nothing ahead: what completes meanwhile joins its next micro-batch.
        """
        idle = [replica for replica, held in enumerate(step.held) if not held]
        if not idle or not step.waiting:
            return []
        budget = self.settings.micro_batch_tokens * self.settings.peers * at_once(self.settings.pipeline_stages)
        batch = feasible(step.waiting, budget * len(idle))
        shares = zip(idle, owners(batch, len(idle)))
        return [self._call(step, replica, call) for replica, share in shares for call in self._calls(share)]

    def _call(self, step: Step, replica: int, micro_batches: Call) -> TrainMicroBatch:
        """One forward and backward of a replica: one micro-batch, or what a pipeline takes in one schedule."""
        step.held[replica] += 1
        self._micro_batches += 1
        items = [item for batch in micro_batches for item in batch]
        return TrainMicroBatch(
            micro_batch=self._micro_batches - 1,
            replica=replica,
            step=self.steps_done,
            slices=tuple(
                Slice(group, tuple(item.sample for item in of)) for group, of in groupby(items, key=lambda item: item.group)
            ),
            tokens=sum(item.tokens for item in items),
            cuts=tuple(len(batch) for batch in micro_batches) if len(micro_batches) > 1 else (),
        )

    def _step_done(self, event: StepDone) -> list[TrainingCommand]:
        assert self._step is not None and self._step.finishing and event.step == self.steps_done
        self._step = None
        self.steps_done += 1
        self._steps_this_iteration += 1
        self._skipped_in_row = self._skipped_in_row + 1 if event.skipped else 0
        if self._skipped_in_row >= self.settings.stop_after_skipped_steps:
            self.done = True
            return [
                StopTraining(
                    reason=f"gradients were not finite in {self._skipped_in_row} steps in a row, the last is step {event.step}"
                )
            ]
        return self._advance()

    # ---- between iterations

    @property
    def _finished(self) -> bool:
        """All iterations are trained; more than wanted where a checkpoint held more."""
        return self.version >= self.settings.iterations

    @property
    def _between_steps(self) -> bool:
        """The weights stand at an iteration's boundary: no step of this one was begun."""
        return self._step is None and not self._steps_this_iteration

    def _end_iteration(self) -> list[TrainingCommand]:
        if not self._all_arrived() or self._fifo:
            return []
        self.iteration += 1
        self.version += 1
        self._ended = None
        self._dropped_orders.clear()
        self._next_order = self.groups_consumed = self._steps_this_iteration = 0
        # A stop in the last iteration is a normal end.
        return [PublishWeights(version=self.version)] if self._stop is None or self._finished else self._save()

    def _published(self, event: WeightsPublished) -> list[TrainingCommand]:
        assert event.version == self.version
        every = self.settings.checkpoint_every_iterations
        if self._finished or (every and self.version and self.version % every == 0):
            return self._save()
        return self._advance()

    def _save(self) -> list[TrainingCommand]:
        """Unless it is saved already, or being saved."""
        if self._saved_version == self.version:
            return [] if self._saving else self._saved()
        self._saved_version, self._saving = self.version, True
        return [SaveCheckpoint(iteration=self.iteration, version=self.version)]

    def _saved(self) -> list[TrainingCommand]:
        self._saving = False
        if self._finished or (self._stop is not None and self._between_steps):
            self.done = True
            return [StopTraining(reason="" if self._finished else self._stop or "")]
        return self._advance()

    def _stop_requested(self, event: StopRequested) -> list[TrainingCommand]:
        """At once where the weights stand at an iteration's boundary; else the iteration is finished first."""
        if self._stop is not None:
            return []
        self._stop = event.reason
        if self.iteration < 0 or not self._between_steps:
            return []
        return self._save()

"""What did every iteration of one attempt take, make and learn?

One pass over the records of both coordinators, in any file order; sums per iteration are kept, and what is open: turns of
groups in flight, micro-batches in flight. The definitions are those of docs/event-log.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rpipe.analysis.run import Record, RunError


@dataclass(slots=True)
class Iteration:
    """Sums over one iteration. Times are `t` of the log, seconds; None until it happened."""

    iteration: int
    requested_t: float | None = None
    rollout_ended_t: float | None = None
    groups_sent: int = 0
    groups_dropped: int = 0
    mixed_groups: int = 0  # groups whose rewards are not all the same: those that teach
    trajectories: int = 0
    generated_tokens: int = 0
    response_tokens: array[int] = field(default_factory=lambda: array("q"))  # one entry a trajectory
    truncated: int = 0  # trajectories that did not stop by themselves
    turns: int = 0  # that those trajectories took
    tool_calls: int = 0
    tool_s: array[float] = field(default_factory=lambda: array("d"))  # one entry a call, queue included
    answer_tokens: int = 0  # of the environment
    tool_errors: int = 0
    tool_error: str = ""  # the first one's words
    reward_sum: float = 0.0
    reward_min: float = float("inf")
    reward_max: float = float("-inf")
    reward_errors: int = 0
    reward_error: str = ""  # the first one's words
    first_micro_batch_t: float | None = None
    first_dispatch_t: float | None = None
    micro_batch_s: float = 0.0  # over all replicas
    bubble_s: float = 0.0  # of them, in which a pipeline stage idled
    step_s: float = 0.0
    train_ended_t: float | None = None
    filled_steps: int = 0
    steps: int = 0
    skipped_steps: int = 0
    groups_trained: int = 0
    logprob_gap_mean: float | None = None
    logprob_gap_max: float | None = None
    replicas: int = 1
    dispatched: dict[int, float] = field(default_factory=dict)  # first step's groups -> first micro-batch's t

    @property
    def complete(self) -> bool:
        """Rolled out, and every group that was sent went through a step that ended."""
        ended = self.requested_t is not None and self.rollout_ended_t is not None
        return ended and self.groups_trained == self.groups_sent and self.steps == self.filled_steps

    def figures(self) -> dict[str, Any]:
        """One row of the report. None where nothing was trained, so that there is nothing to measure."""
        if self.requested_t is None or self.rollout_ended_t is None:
            raise ValueError(f"iteration {self.iteration} is not complete")
        busy_s = self.micro_batch_s / self.replicas + self.step_s
        whole_s = _since(self.requested_t, self.train_ended_t)
        begun_s = _since(self.requested_t, self.first_micro_batch_t)
        return {
            "iteration": self.iteration,
            "rollout_s": self.rollout_ended_t - self.requested_t,
            "train_busy_s": busy_s,
            "rollout_to_train_end_s": whole_s,
            "first_dispatch_s": _since(self.requested_t, self.first_dispatch_t),
            "waiting_ratio_start": begun_s / whole_s if begun_s is not None and whole_s else None,
            "waiting_ratio_busy": 1 - busy_s / whole_s if whole_s else None,
            "pipeline_bubble": self.bubble_s / self.micro_batch_s if self.micro_batch_s else None,
            "steps": self.steps,
            "groups_trained": self.groups_trained,
            "groups_dropped": self.groups_dropped,
            "trajectories": self.trajectories,
            "generated_tokens": self.generated_tokens,
            "reward_mean": self.reward_sum / self.trajectories if self.trajectories else None,
            "logprob_gap_mean": self.logprob_gap_mean,
            "logprob_gap_max": self.logprob_gap_max,
        }


def _as_left(group: Record) -> list[tuple[int, bool, int]]:
    """Of each trajectory: tokens, whether it was cut short, turns. Older logs tell tokens only: not cut, no turn counted."""
    lengths = group["output_tokens"]
    finishes, turns = group.get("finishes") or ["stop"] * len(lengths), group.get("turns") or [0] * len(lengths)
    return [(tokens, finish != "stop", taken) for tokens, finish, taken in zip(lengths, finishes, turns)]


def _since(start: float, t: float | None) -> float | None:
    return None if t is None else t - start


@dataclass(slots=True)
class Attempt:
    """What one attempt's log says."""

    iterations: dict[int, Iteration] = field(default_factory=dict)
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    replicas: int = 1  # data-parallel
    stages: int = 1  # of the pipeline in each
    seconds: float = 0.0
    start_s: float = 0.0  # until all training ranks stood, warm-up included
    warm_up_s: float = 0.0
    evaluation_s: float = 0.0
    publish_s: list[float] = field(default_factory=list)
    checkpoint_s: list[float] = field(default_factory=list)
    events: int = 0
    end: str | None = None  # why it ended, empty at a normal end; None if the job never said

    @classmethod
    def of(cls, records: Iterable[Record]) -> Attempt:
        """Read it all. Raises RunError where a known kind lacks a field."""
        attempt = cls()
        reader = _Reader(attempt)
        for record in records:
            reader.take(record)
        for iteration in attempt.iterations.values():
            iteration.replicas = attempt.replicas
        return attempt


class _Reader:
    """Files one record after another under its iteration. Kinds that no figure needs are passed over."""

    def __init__(self, attempt: Attempt) -> None:
        self.to = attempt
        self.group_iteration: dict[int, int] = {}  # training groups of the iterations that roll out
        self.turns: dict[tuple[int, int], tuple[int, bool, int]] = {}  # trajectory -> tokens so far, cut short, turns
        self.restored: dict[int, list[tuple[int, bool, int]]] = {}  # the same of groups that came finished
        self.step_iteration: dict[int, int] = {}  # begun, not done
        self.step_groups: dict[int, int] = {}  # step -> how many groups it consumes
        self.batch_iteration: dict[tuple[int, int], tuple[int, int]] = {}  # (replica, micro-batch) in flight -> and its cuts
        self.evaluation_t: float | None = None
        self.handlers: dict[str, Callable[[Record], None]] = {
            "RolloutRequested": self._requested,
            "GroupsDrawn": self._drawn,
            "TurnFinished": self._turn,
            "ToolFinished": self._tool,
            "TrajectoryScored": self._scored,
            "SendGroup": self._group,
            "DropGroup": self._group,
            "EndRollout": self._rollout_ended,
            "EndEvaluation": self._evaluated,
            "TrainerReady": self._ready,
            "BeginStep": self._step_begun,
            "TrainMicroBatch": self._dispatched,
            "MicroBatchDone": self._trained,
            "FinishStep": self._step_filled,
            "StepDone": self._step_done,
            "WeightsPublished": self._published,
            "CheckpointSaved": self._saved,
            "WarmedUp": self._warmed_up,
            "JobEnded": self._ended,
        }

    def take(self, record: Record) -> None:
        try:
            self.to.events += record["io"] == "event"
            self.to.seconds = max(self.to.seconds, record["t"])
            handler = self.handlers.get(record["kind"])
            if handler is not None:
                handler(record)
        except KeyError as error:
            where = f"rank {record.get('rank')}, seq {record.get('seq')}"
            raise RunError(f"event log of {where}: {record.get('kind', 'a record')} lacks {error}") from None

    def _at(self, iteration: int) -> Iteration:
        return self.to.iterations.setdefault(iteration, Iteration(iteration))

    # ---- rollout ----------------------------------------------------------------------------------------------------

    def _requested(self, r: Record) -> None:
        if r["purpose"] == "eval":
            self.evaluation_t = r["t"]
            return
        self._at(r["iteration"]).requested_t = r["t"]
        self._drawn(r)

    def _drawn(self, r: Record) -> None:
        for group in r["groups"]:
            self.group_iteration[group["group"]] = r["iteration"]
            if group.get("rewards"):
                self.restored[group["group"]] = _as_left(group)

    def _turn(self, r: Record) -> None:
        group, index = r["trajectory"]
        if group in self.group_iteration:
            tokens, _, turns = self.turns.get((group, index), (0, False, 0))
            self.turns[group, index] = tokens + r["output_tokens"], r["finish"] != "stop", turns + 1

    def _tool(self, r: Record) -> None:
        iteration = self.group_iteration.get(r["trajectory"][0])
        if iteration is None:
            return
        at = self._at(iteration)
        at.tool_calls += 1
        at.tool_s.append(r["t"] - r["started_t"])
        at.answer_tokens += r["observation_tokens"]
        if r.get("error"):
            at.tool_errors += 1
            at.tool_error = at.tool_error or r["error"]

    def _scored(self, r: Record) -> None:
        iteration = self.group_iteration.get(r["trajectory"][0])
        if r.get("error") and iteration is not None:
            at = self._at(iteration)
            at.reward_errors += 1
            at.reward_error = at.reward_error or r["error"]

    def _group(self, r: Record) -> None:
        at, rewards = self._at(r["iteration"]), r["rewards"]
        restored = self.restored.pop(r["group"], None)
        for index in range(len(rewards)):
            tokens, cut, turns = self.turns.pop((r["group"], index), (0, False, 0))
            length = tokens
            if restored is not None:
                length, cut, turns = restored[index]
            at.turns += turns
            at.generated_tokens += tokens
            at.response_tokens.append(length)
            at.truncated += cut
        at.trajectories += len(rewards)
        at.reward_sum += sum(rewards)
        if rewards:
            low, high = min(rewards), max(rewards)
            at.reward_min, at.reward_max = min(at.reward_min, low), max(at.reward_max, high)
            at.mixed_groups += low != high
        at.groups_dropped += r["kind"] == "DropGroup"
        self.group_iteration.pop(r["group"], None)
        if not rewards:  # not needed in the end: cut, and in no figure
            for turn in [key for key in self.turns if key[0] == r["group"]]:
                del self.turns[turn]

    def _rollout_ended(self, r: Record) -> None:
        at = self._at(r["iteration"])
        at.rollout_ended_t, at.groups_sent = r["t"], r["groups_sent"]

    def _evaluated(self, r: Record) -> None:
        self.to.evaluations[r["iteration"]] = {key: r[key] for key in ("iteration", "reward_mean", "count")}
        if self.evaluation_t is not None:
            self.to.evaluation_s += r["t"] - self.evaluation_t

    # ---- training ---------------------------------------------------------------------------------------------------

    def _ready(self, r: Record) -> None:
        self.to.start_s = r["t"]
        self.to.replicas, self.to.stages = r["replicas"], r.get("stages", 1)

    def _step_begun(self, r: Record) -> None:
        self.step_iteration[r["step"]] = r["iteration"]

    def _dispatched(self, r: Record) -> None:
        iteration = self.step_iteration.get(r["step"])
        if iteration is None:  # a supervised warm-up step: of no iteration
            return
        at = self._at(iteration)
        self.batch_iteration[r["replica"], r["micro_batch"]] = at.iteration, len(r.get("cuts") or [1])
        if at.first_dispatch_t is None:
            for part in r["slices"]:
                at.dispatched.setdefault(part["group"], r["t"])

    def _trained(self, r: Record) -> None:
        found = self.batch_iteration.pop((r["replica"], r["micro_batch"]), None)
        if found is None:
            return
        at, seconds, idle = self._at(found[0]), r["ended_t"] - r["started_t"], self.to.stages - 1
        at.micro_batch_s += seconds
        at.bubble_s += seconds * idle / (found[1] + idle)
        if at.first_micro_batch_t is None or r["started_t"] < at.first_micro_batch_t:
            at.first_micro_batch_t = r["started_t"]

    def _step_filled(self, r: Record) -> None:
        self.step_groups[r["step"]] = len(r["groups"])
        at = self._at(r["iteration"])
        at.filled_steps += 1
        if at.first_dispatch_t is None:  # the first step: when had the last of its groups left the FIFO?
            at.first_dispatch_t = max(at.dispatched.values(), default=None)
            at.dispatched.clear()

    def _step_done(self, r: Record) -> None:
        iteration = self.step_iteration.pop(r["step"], None)
        if iteration is None:
            return
        at = self._at(iteration)
        if at.steps == 0:  # engine and trainer hold the same weights on the first step only
            at.logprob_gap_mean, at.logprob_gap_max = r["logprob_gap_mean"], r["logprob_gap_max"]
        at.steps += 1
        at.skipped_steps += r["skipped"]
        at.step_s += r["t"] - r["started_t"]
        at.train_ended_t = r["t"]
        at.groups_trained += self.step_groups.pop(r["step"], 0)

    def _published(self, r: Record) -> None:
        self.to.publish_s.append(r["t"] - r["started_t"])

    def _saved(self, r: Record) -> None:
        self.to.checkpoint_s.append(r["t"] - r["started_t"])

    def _warmed_up(self, r: Record) -> None:  # every training rank says so, of the same steps
        self.to.warm_up_s = max(self.to.warm_up_s, r["t"] - r["started_t"])

    def _ended(self, r: Record) -> None:
        self.to.end = self.to.end or r["reason"]

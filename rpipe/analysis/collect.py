"""How does one attempt's stream of records become iterations, one after another?

`Collector.take` files a record under its iteration and returns the iterations that can change no more, so that memory holds
three of them however long the log is. Records may come a little out of order: clocks of two ranks differ by microseconds.
Kinds that this file does not know are kept as marks, so that nothing a newer rpipe logs is lost to the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rpipe.analysis.run import Record, RunError
from rpipe.analysis.spans import Detail, Group, Mark, MicroBatch, Outage, Publish, Step, Tool, Track, Trajectory, Turn

OPEN_ITERATIONS = 3  # the one that rolls out, the one that trains, and one for stragglers of the log
MARKS_PER_KIND = 200  # kept with their text; the rest is counted
# Nothing to draw: what they say is in the records around them.
SILENT = frozenset(
    ("TurnStarted", "GroupReceived", "WeightsOffered", "DeadlinePassed", "UpdateEngine", "ConfirmWeights", "RequestRollout")
    + ("GroupDropped", "RolloutEnded", "PublishWeights", "SaveCheckpoint", "FinishRun", "StopTraining")
    + ("ClockOffset", "JobEnded", "EngineUp", "EngineReady", "RestartEngine", "StepTrained", "RequestGroups", "FilterGroup")
    + ("AbortTurn",)
)
_HEAD = frozenset(("v", "t", "rank", "seq", "io", "kind"))


class Collector:
    """Fill with `take`, end with `close`. Raises RunError where a known kind lacks a field."""

    def __init__(self) -> None:
        self.track = Track()
        self.replicas = 1
        self._open: dict[int, Detail] = {}  # training iterations, oldest first
        self._evaluation: Detail | None = None
        self._home: dict[int, Detail] = {}  # group -> its iteration
        self._step_home: dict[int, Detail] = {}
        self._in_flight: dict[tuple[int, int], tuple[Detail, MicroBatch]] = {}  # (replica, number)
        self._updates: dict[int, dict[int, tuple[float, float]]] = {}  # version -> engine -> span
        self._closed: list[Detail] = []
        self._handlers: dict[str, Callable[[Record], None]] = {
            "RolloutRequested": self._requested,
            "GroupsDrawn": self._drawn,
            "SendTurn": self._sent_turn,
            "TurnFinished": self._turn,
            "RunTool": self._asked_tool,
            "ToolFinished": self._tool,
            "ScoreTrajectory": self._score,
            "TrajectoryScored": self._scored,
            "ServingComplete": self._served,
            "GroupFiltered": self._filtered,
            "SendGroup": self._group,
            "DropGroup": self._group,
            "EndRollout": self._rollout_ended,
            "EndEvaluation": self._evaluated,
            "EngineUpdated": self._engine_updated,
            "EngineLost": self._engine_lost,
            "EngineRestarted": self._engine_restarted,
            "TrainerReady": self._ready,
            "GroupArrived": self._arrived,
            "BeginStep": self._step_begun,
            "TrainMicroBatch": self._dispatched,
            "MicroBatchDone": self._trained,
            "FinishStep": self._filled,
            "StepDone": self._step_done,
            "WeightsPublished": self._published,
            "CheckpointSaved": self._saved,
            "WarmedUp": self._warmed_up,
            "JobStarted": self._started,
            "Simulated": self._simulated,
        }

    def take(self, record: Record) -> list[Detail]:
        """Evaluations come when they end; an iteration comes when the second next one begins."""
        try:
            if record["t"] > self.track.ended_t:
                self.track.ended_t = record["t"]
            kind = record["kind"]
            handler = self._handlers.get(kind)
            if handler is not None:
                handler(record)
            elif kind not in SILENT:
                self._mark(record)
        except KeyError as error:
            where = f"rank {record.get('rank')}, seq {record.get('seq')}"
            raise RunError(f"event log of {where}: {record.get('kind', 'a record')} lacks {error}") from None
        if not self._closed:
            return []
        closed, self._closed = self._closed, []
        return closed

    def close(self) -> list[Detail]:
        """What is still open when the log ends, oldest first."""
        left = [*self._open.values(), *([self._evaluation] if self._evaluation else [])]
        self._open, self._evaluation = {}, None
        return [self._sealed(detail) for detail in left]

    def _sealed(self, detail: Detail) -> Detail:
        detail.replicas = self.replicas
        if detail.publish is not None:
            detail.publish.engines = self._updates.pop(detail.publish.version, {})
        for group in detail.groups:
            if self._home.get(group) is detail:
                del self._home[group]
        for step in detail.steps:
            self._step_home.pop(step, None)
        return detail

    def _at(self, iteration: int) -> Detail:
        """The iteration, opened if need be; opening one too many closes the oldest."""
        found = self._open.get(iteration)
        if found is None:
            found = self._open[iteration] = Detail(iteration, replicas=self.replicas)
            if len(self._open) > OPEN_ITERATIONS:
                self._closed.append(self._sealed(self._open.pop(min(self._open))))
        return found

    def _in_group(self, group: int, iteration: int) -> Group:
        detail = self._home.get(group) or self._at(iteration)
        if group not in detail.groups:
            detail.groups[group] = Group(group, len(detail.groups), detail.requested_t or 0.0)
            self._home[group] = detail
        return detail.groups[group]

    def _trajectory(self, r: Record) -> Trajectory | None:
        number, sample = r["trajectory"]
        detail = self._home.get(number)
        if detail is None or number not in detail.groups:
            return None
        group = detail.groups[number]
        found = group.trajectories.get(sample)
        if found is None:
            found = group.trajectories[sample] = Trajectory(number, sample)
        return found

    # ---- rollout ----------------------------------------------------------------------------------------------------

    def _requested(self, r: Record) -> None:
        if r["purpose"] == "eval":
            detail = self._evaluation = Detail(r["iteration"], purpose="eval")
        else:
            for earlier in self._open.values():
                if earlier.next_t is None and earlier.iteration < r["iteration"]:
                    earlier.next_t = r["t"]
            detail = self._at(r["iteration"])
        if detail.requested_t is None:  # a second one for the same iteration only adds groups
            detail.requested_t, detail.version = r["t"], r["version"]
        self._take_in(detail, r)

    def _drawn(self, r: Record) -> None:
        """More groups of the running rollout."""
        self._take_in(self._at(r["iteration"]), r)

    def _take_in(self, detail: Detail, r: Record) -> None:
        for spec in r["groups"]:
            group = Group(spec["group"], len(detail.groups), r["t"], spec["prompt_tokens"])
            if spec.get("rewards"):
                group.restored_tokens = tuple(spec["output_tokens"])
            detail.groups[spec["group"]] = group
            self._home[spec["group"]] = detail

    def _sent_turn(self, r: Record) -> None:
        trajectory = self._trajectory(r)
        if trajectory is None:
            return
        if trajectory.turns and trajectory.turns[-1].ended_t is None:  # its engine never answered: it goes on elsewhere
            trajectory.turns[-1].ended_t, trajectory.turns[-1].finish = r["t"], "lost"
        trajectory.turns.append(Turn(r["engine"], r["t"], prefix_tokens=r.get("prefix_tokens", 0)))

    def _turn(self, r: Record) -> None:
        trajectory = self._trajectory(r)
        if trajectory is None:
            return
        if not trajectory.turns or trajectory.turns[-1].ended_t is not None:
            trajectory.turns.append(Turn(r["engine"], r["started_t"]))
        turn = trajectory.turns[-1]
        turn.engine, turn.started_t, turn.first_token_t, turn.ended_t = r["engine"], r["started_t"], r["first_token_t"], r["t"]
        turn.output_tokens, turn.finish = r["output_tokens"] - turn.prefix_tokens, r["finish"]
        turn.cached_tokens = r.get("cached_tokens", 0)

    def _asked_tool(self, r: Record) -> None:
        trajectory = self._trajectory(r)
        if trajectory is not None and trajectory.turns:
            trajectory.turns[-1].tool = Tool(r["t"])

    def _tool(self, r: Record) -> None:
        trajectory = self._trajectory(r)
        if trajectory is not None and trajectory.turns:
            trajectory.turns[-1].tool = Tool(r["started_t"], r["t"], r["observation_tokens"], r.get("error", ""))

    def _engine_lost(self, r: Record) -> None:
        """What ran on it stops there; a turn that began on it keeps what its engine had streamed."""
        outage = Outage(r["engine"], r["t"], r["reason"])
        prefixes = {tuple(prefix["trajectory"]): prefix["output_tokens"] for prefix in r.get("prefixes", ())}
        for detail in (*self._open.values(), *([self._evaluation] if self._evaluation else [])):
            for trajectory in detail.trajectories():
                turn = trajectory.turns[-1] if trajectory.turns else None
                if turn is not None and turn.engine == r["engine"] and turn.ended_t is None:
                    turn.ended_t, turn.finish = r["t"], "lost"
                    turn.output_tokens = max(0, prefixes.get((trajectory.group, trajectory.sample), 0) - turn.prefix_tokens)
                    outage.turns += 1
                    outage.kept_tokens += turn.output_tokens
        self.track.outages.append(outage)

    def _engine_restarted(self, r: Record) -> None:
        for outage in self.track.outages:
            if outage.engine == r["engine"] and outage.restarted_t is None:
                outage.restarted_t = r["t"]

    def _score(self, r: Record) -> None:
        trajectory = self._trajectory(r)
        if trajectory is not None:
            trajectory.score_asked_t = r["t"]

    def _scored(self, r: Record) -> None:
        trajectory = self._trajectory(r)
        if trajectory is not None:
            trajectory.score_started_t, trajectory.scored_t = r["started_t"], r["t"]
            trajectory.reward, trajectory.error = r["reward"], r.get("error", "")

    def _served(self, r: Record) -> None:
        detail = self._home.get(r["group"])
        if detail is not None and r["group"] in detail.groups:
            detail.groups[r["group"]].served_t = r["t"]

    def _filtered(self, r: Record) -> None:
        detail = self._home.get(r["group"])
        if detail is not None and r["group"] in detail.groups:
            detail.groups[r["group"]].filtered_t = r["t"]

    def _group(self, r: Record) -> None:
        group = self._in_group(r["group"], r["iteration"])
        group.sent_t, group.rewards, group.order = r["t"], tuple(r["rewards"]), r["order"]
        group.dropped = r["reason"] if r["kind"] == "DropGroup" else ""

    def _rollout_ended(self, r: Record) -> None:
        self._at(r["iteration"]).rollout_ended_t = r["t"]

    def _evaluated(self, r: Record) -> None:
        if self._evaluation is not None:
            self._evaluation.rollout_ended_t = r["t"]
            self._closed.append(self._sealed(self._evaluation))
            self._evaluation = None

    # ---- training ---------------------------------------------------------------------------------------------------

    def _ready(self, r: Record) -> None:
        self.track.ready_t, self.replicas = r["t"], r["replicas"]

    def _arrived(self, r: Record) -> None:
        self._in_group(r["group"], r["iteration"]).arrived_t = r["t"]

    def _step_begun(self, r: Record) -> None:
        detail = self._at(r["iteration"])
        detail.steps[r["step"]] = Step(r["step"], begun_t=r["t"])
        self._step_home[r["step"]] = detail

    def _dispatched(self, r: Record) -> None:
        detail = self._step_home.get(r["step"])
        if detail is None:  # a supervised warm-up step: of no iteration
            return
        slices = tuple((part["group"], tuple(part["samples"])) for part in r["slices"])
        batch = MicroBatch(r["micro_batch"], r["replica"], r["step"], r["t"], r["tokens"], slices)
        detail.micro_batches.append(batch)
        self._in_flight[batch.replica, batch.number] = detail, batch
        for number, _ in slices:
            group = detail.groups.get(number)
            if group is not None:
                group.step = r["step"]
                if group.dispatched_t is None:
                    group.dispatched_t = r["t"]

    def _trained(self, r: Record) -> None:
        found = self._in_flight.pop((r["replica"], r["micro_batch"]), None)
        if found is None:
            return
        detail, batch = found
        batch.started_t, batch.ended_t = r["started_t"], r["ended_t"]
        for number, _ in batch.slices:
            group = detail.groups.get(number)
            if group is not None:
                group.trained_t = max(group.trained_t or r["ended_t"], r["ended_t"])

    def _filled(self, r: Record) -> None:
        detail = self._step_home.get(r["step"])
        if detail is not None:
            step = detail.steps[r["step"]]
            step.filled_t, step.groups = r["t"], tuple(r["groups"])
            for number in step.groups:
                if number in detail.groups:
                    detail.groups[number].step = r["step"]

    def _step_done(self, r: Record) -> None:
        detail = self._step_home.get(r["step"])
        if detail is not None:
            step = detail.steps[r["step"]]
            step.started_t, step.ended_t, step.skipped = r["started_t"], r["t"], r["skipped"]
            step.loss, step.grad_norm = r.get("loss"), r.get("grad_norm")

    # ---- between ----------------------------------------------------------------------------------------------------

    def _engine_updated(self, r: Record) -> None:
        self._updates.setdefault(r["version"], {})[r["engine"]] = r["started_t"], r["t"]
        for version in [v for v in self._updates if v < r["version"] - OPEN_ITERATIONS]:
            del self._updates[version]

    def _published(self, r: Record) -> None:
        engines = self._updates.setdefault(r["version"], {})  # shared: a straggler of the log still lands in it
        publish = Publish(r["version"], r["started_t"], r["t"], r.get("nbytes", 0), engines)
        self.track.publishes.append(publish)
        detail = self._open.get(r["version"] - 1)
        if detail is not None:
            detail.publish = publish

    def _saved(self, r: Record) -> None:
        self.track.checkpoints.append((r["started_t"], r["t"], r["iteration"]))

    def _warmed_up(self, r: Record) -> None:
        self.track.warm_up = r["started_t"], r["t"]

    def _started(self, r: Record) -> None:
        self.track.hosts[r["rank"]] = r.get("host", "")
        if "unix_s" in r and (self.track.unix_s is None or r["rank"] == 0):
            self.track.unix_s = r["unix_s"] - r["t"]

    def _simulated(self, r: Record) -> None:
        self.track.simulated = r["hardware"]
        self.track.calibrated = r.get("calibrated")

    def _mark(self, r: Record) -> None:
        kind = r["kind"]
        count = self.track.marked[kind] = self.track.marked.get(kind, 0) + 1
        if count <= MARKS_PER_KIND:
            self.track.marks.append(Mark(r["t"], r["rank"], kind, fields(r)))


def fields(record: Record) -> str:
    """A record's own fields as short text: `engine 1, reason "silent for 30 s"`."""
    shown = []
    for key, value in record.items():
        if key not in _HEAD:
            text = f'"{value}"' if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)
            shown.append(f"{key} {text if len(text) <= 120 else text[:117] + '...'}")
    return ", ".join(shown)


def collect(records: Iterable[Record]) -> tuple[list[Detail], Track]:
    """All iterations at once: for logs that fit in memory."""
    collector = Collector()
    found = [detail for record in records for detail in collector.take(record)]
    return [*found, *collector.close()], collector.track


def stream(records: Iterable[Record], collector: Collector) -> Iterator[Detail]:
    """Each iteration as it closes; `collector.track` is whole when the stream ends."""
    for record in records:
        yield from collector.take(record)
    yield from collector.close()

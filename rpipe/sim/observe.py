"""What did real jobs take for what? Durations out of event logs, for the fit of a hardware profile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from rpipe.analysis.run import Record, attempts, read
from rpipe.sim.costs import cut

OUTLIER = 4.0  # what a first fit misses by so many times the usual is left out of a second
Span = tuple[float, float]


class FitError(ValueError):
    """One line for the person who named the runs."""


@dataclass(frozen=True, slots=True)
class SeenTurn:
    engine: int
    started_t: float
    first_t: float
    end_t: float
    output_tokens: int
    fresh_tokens: int  # of the prompt and earlier turns, not cached


@dataclass(frozen=True, slots=True)
class SeenBatch:
    replica: int
    started_t: float
    ended_t: float
    micro_batches: list[list[int]]  # tokens of their trajectories; several where a pipeline ran them in one go


@dataclass(slots=True)
class Seen:
    """One attempt. Latencies are lists, to take medians of."""

    simulated: bool = False
    stages: int = 1  # of the trainer's pipeline
    prompt_tokens: list[int] = field(default_factory=list)  # of each group
    turns: list[SeenTurn] = field(default_factory=list)
    batches: list[SeenBatch] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)
    publishes: list[tuple[int, float]] = field(default_factory=list)  # engines, and UpdateEngine to EngineUpdated of one
    confirm_s: list[float] = field(default_factory=list)  # ConfirmWeights to WeightsPublished
    draw_s: list[float] = field(default_factory=list)  # ConfirmWeights to RolloutRequested
    reward_s: list[float] = field(default_factory=list)
    groups: list[Span] = field(default_factory=list)  # SendGroup to GroupArrived
    checkpoint_s: list[float] = field(default_factory=list)


def observe(run: Path) -> list[Seen]:
    """One for each attempt. Raises RunError."""
    return [observed(read(attempt)) for attempt in attempts(run)]


def observed(records: Iterable[Record]) -> Seen:
    """Of one attempt: the rollout coordinator's records, then the training coordinator's."""
    return _Reader().of(records)


class _Reader:
    def __init__(self) -> None:
        self.seen = Seen()
        self.prompt_tokens: dict[int, int] = {}
        self.history_tokens: dict[tuple[int, ...], int] = {}  # of a trajectory's turn, before it
        self.tokens: dict[int, list[int]] = {}  # of a group's trajectories
        self.batches: dict[int, dict[str, Any]] = {}
        self.sent_t: dict[int, float] = {}
        self.update_t: dict[tuple[int, int], float] = {}
        self.takers: dict[int, set[int]] = {}  # of a version
        self.confirm_t: dict[int, float] = {}
        self.done: list[dict[str, Any]] = []

    def of(self, records: Iterable[Record]) -> Seen:
        for record in records:
            self._take(record)
        for record in self.done:  # a group's lengths are known once it arrived
            command = self.batches[record["micro_batch"]]
            lengths = [self.tokens[part["group"]][sample] for part in command["slices"] for sample in part["samples"]]
            cuts = cut(lengths, command.get("cuts") or [])
            self.seen.batches.append(SeenBatch(record["replica"], record["started_t"], record["ended_t"], cuts))
        self.seen.prompt_tokens = list(self.prompt_tokens.values())
        return self.seen

    def _take(self, r: dict[str, Any]) -> None:
        match r["kind"]:
            case "Simulated":
                self.seen.simulated = True
            case "RolloutRequested" | "GroupsDrawn":
                self.prompt_tokens.update({spec["group"]: spec["prompt_tokens"] for spec in r["groups"]})
                if r.get("version") in self.confirm_t:
                    self.seen.draw_s.append(r["t"] - self.confirm_t[r["version"]])
            case "SendTurn":
                self.history_tokens[tuple(r["trajectory"])] = r.get("history_tokens", 0)
            case "TurnFinished" if r["first_token_t"]:
                prompt = self.prompt_tokens.get(r["trajectory"][0], 0) + self.history_tokens.get(tuple(r["trajectory"]), 0)
                fresh = max(prompt - r["cached_tokens"], 1)
                turn = SeenTurn(r["engine"], r["started_t"], r["first_token_t"], r["t"], r["output_tokens"], fresh)
                self.seen.turns.append(turn)
            case "TrajectoryScored":
                self.seen.reward_s.append(r["t"] - r["started_t"])
            case "SendGroup":
                self.sent_t[r["group"]] = r["t"]
            case "GroupArrived":
                self.tokens[r["group"]] = r["tokens"]
                self.seen.groups.append((self.sent_t[r["group"]], r["t"]))
            case "TrainerReady":
                self.seen.stages = r.get("stages", 1)
            case "TrainMicroBatch":
                self.batches[r["micro_batch"]] = r
            case "MicroBatchDone":
                self.done.append(r)
            case "StepDone":
                self.seen.steps.append((r["started_t"], r["t"]))
            case "UpdateEngine":
                self.update_t[r["engine"], r["version"]] = r["t"]
                self.takers.setdefault(r["version"], set()).add(r["engine"])
            case "EngineUpdated":
                self.seen.publishes.append((len(self.takers[r["version"]]), r["t"] - self.update_t[r["engine"], r["version"]]))
            case "ConfirmWeights":
                self.confirm_t[r["version"]] = r["t"]
            case "WeightsPublished" if r["version"] in self.confirm_t:
                self.seen.confirm_s.append(r["t"] - self.confirm_t[r["version"]])
            case "CheckpointSaved":
                self.seen.checkpoint_s.append(r["t"] - r["started_t"])


def trained(seen: Seen) -> list[Span]:
    return [*((b.started_t, b.ended_t) for b in seen.batches), *seen.steps]


class Timeline:
    """How many of some spans are open at a time, and their integral."""

    def __init__(self, spans: list[Span]) -> None:
        changes: dict[float, int] = {}
        for start, end in spans:
            if end > start:
                changes[start] = changes.get(start, 0) + 1
                changes[end] = changes.get(end, 0) - 1
        self.times = sorted(changes)
        self.counts = list(accumulate(changes[t] for t in self.times))

    def at(self, t: float) -> int:
        index = bisect_right(self.times, t) - 1
        return self.counts[index] if index >= 0 else 0

    def pieces(self, start: float, end: float) -> list[tuple[float, float, int]]:
        """[start, end) cut where the count changes."""
        low, high = bisect_right(self.times, start), bisect_right(self.times, end - 1e-12)
        edges = [start, *self.times[low:high], end]
        return [(a, b, self.at(a)) for a, b in pairwise(edges) if b > a]


def joined(spans: list[Span]) -> list[Span]:
    """Their union."""
    union: list[Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union

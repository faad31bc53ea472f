"""How long is each prompt and turn, and what is a response worth? Decided by seed and ids alone, never by the order of events.

Synthetic: a response's length is a quantile of the chosen distribution at a normal score z. Siblings share a part of it,

    z = sqrt(correlation) x the group's score + sqrt(1 - correlation) x the trajectory's own,

so that `workload.correlation` is the intraclass correlation of the scores (of log-lengths, where lengths are log-normal).
Agents take several turns: their number, lengths, answers and tool times have such scores each. Or replayed, from a trace file
or a run's event log: turns, lengths and rewards, never what engines and trainer took for them. How long a tool took is the
environment's own: as recorded, unless `workload.agents` is there to draw it anew.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from rpipe.analysis.run import RunError, attempts, read
from rpipe.config import Config, ConfigError
from rpipe.config_simulation import Agents, Workload


@dataclass(frozen=True, slots=True)
class TurnWork:
    """What is generated, what the environment answers to it, and how long that takes it."""

    output_tokens: int
    answer_tokens: int = 0
    tool_s: float = 0.0


Turns = tuple[TurnWork, ...]  # of one trajectory


@dataclass(frozen=True, slots=True)
class GroupWork:
    """One group's K responses."""

    prompt_tokens: int
    turns: list[Turns]
    rewards: list[float]
    reward_s: list[float]

    @property
    def output_tokens(self) -> list[int]:
        """Generated in each response."""
        return [sum(t.output_tokens for t in turns) for turns in self.turns]

    @property
    def response_tokens(self) -> list[int]:
        """In each response, answers too."""
        return [sum(t.output_tokens + t.answer_tokens for t in turns) for turns in self.turns]


class Source(Protocol):
    def group(self, group: int, iteration: int, samples: int) -> GroupWork:
        """Raises ConfigError where a trace does not hold it. Held-out groups are negative."""
        ...


def source_of(config: Config) -> Source:
    """Raises ConfigError where there is none, or its file cannot be read."""
    workload = config.workload
    if workload is None:
        raise ConfigError("workload: missing; wanted: how long responses are, such as workload.median_tokens=256")
    if workload.lengths == "run":
        return from_run(workload, config.run.seed)
    if workload.lengths == "trace":
        return from_trace(workload, config.run.seed)
    return Synthetic(workload, config.run.seed, config.rollout.max_new_tokens, config.rollout.max_turns)


@dataclass(frozen=True)
class Synthetic:
    workload: Workload
    seed: int
    limit_tokens: int
    max_turns: int = 1

    def group(self, group: int, iteration: int, samples: int) -> GroupWork:
        w, draw = self.workload, _random(self.seed, group, iteration)
        quantile = self._quantile()
        length = _scores(draw, w.correlation)
        if w.agents is None:
            lengths = [quantile(next(length)) for _ in range(samples)]
            turns: list[Turns] = [(TurnWork(min(max(round(n), 1), self.limit_tokens)),) for n in lengths]
        else:
            count, answer, tool = (_scores(draw, w.correlation) for _ in range(3))
            turns = [self._agent(w.agents, quantile, next(count), length, answer, tool) for _ in range(samples)]
        return GroupWork(
            prompt_tokens=w.prompt_tokens,
            turns=turns,
            rewards=[float(draw.random() < w.reward_mean) for _ in range(samples)],
            reward_s=_reward_s(w, draw, samples),
        )

    def _agent(
        self,
        agents: Agents,
        quantile: Callable[[float], float],
        count: float,
        length: Iterator[float],
        answer: Iterator[float],
        tool: Iterator[float],
    ) -> Turns:
        """As many turns as `agents` wants, `rollout.max_turns` allows and max_new_tokens has room for."""
        wanted = min(max(round(agents.turns * math.exp(agents.turns_sigma * count)), 1), self.max_turns)
        left = self.limit_tokens
        turns: list[TurnWork] = []
        while True:
            output_tokens = min(max(round(quantile(next(length))), 1), left)
            answer_tokens = max(round(agents.answer_tokens * math.exp(agents.answer_sigma * next(answer))), 1)
            left -= output_tokens + answer_tokens
            if len(turns) + 1 == wanted or left <= 0:  # the environment says at once that it is done
                return (*turns, TurnWork(output_tokens))
            turns.append(TurnWork(output_tokens, answer_tokens, agents.tool_s * math.exp(agents.tool_sigma * next(tool))))

    def _quantile(self) -> Callable[[float], float]:
        w = self.workload
        if w.lengths == "lognormal":
            return lambda z: w.median_tokens * math.exp(w.sigma * z)
        return lambda z: between(w.quantiles, 0.5 * math.erfc(-z / math.sqrt(2)))


def _scores(draw: random.Random, correlation: float) -> Iterator[float]:
    """Normal scores of one group: a shared part, then each one's own."""
    shared, own = math.sqrt(correlation), math.sqrt(1 - correlation)
    together = draw.gauss(0.0, 1.0)
    while True:
        yield shared * together + own * draw.gauss(0.0, 1.0)


def between(quantiles: list[tuple[float, float]], share: float) -> float:
    """Interpolated in the logarithm of tokens; the ends are the least and the most."""
    at = min(max(bisect_right(quantiles, (share, math.inf)), 1), len(quantiles) - 1)
    (s0, t0), (s1, t1) = quantiles[at - 1], quantiles[at]
    part = min(max((share - s0) / (s1 - s0), 0.0), 1.0)
    return math.exp(math.log(t0) + part * (math.log(t1) - math.log(t0)))


def _random(seed: int, group: int, iteration: int) -> random.Random:
    return random.Random(f"{seed}:{group}" if group >= 0 else f"{seed}:eval:{iteration}:{group}")


def _reward_s(workload: Workload, draw: random.Random, samples: int) -> list[float]:
    if not workload.reward_s:
        return [0.0] * samples
    return [workload.reward_s * math.exp(workload.reward_sigma * draw.gauss(0.0, 1.0)) for _ in range(samples)]


# ---- what was seen before -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    prompt_tokens: int | None = None
    turns: list[TurnWork] = field(default_factory=list)
    reward: float | None = None
    reward_s: float | None = None


@dataclass(frozen=True)
class Replayed:
    """Looked up; what was not recorded is drawn."""

    workload: Workload
    seed: int
    origin: str
    seen: dict[tuple[int, int, int], _Seen]  # iteration (0 for training groups: their numbers are unique), group, sample

    def group(self, group: int, iteration: int, samples: int) -> GroupWork:
        w, draw = self.workload, _random(self.seed, group, iteration)
        rewards = [float(draw.random() < w.reward_mean) for _ in range(samples)]
        seconds = _reward_s(w, draw, samples)
        tool = _scores(draw, w.correlation)
        rows = [self.seen.get((iteration if group < 0 else 0, group, sample)) for sample in range(samples)]
        found = [row for row in rows if row is not None and row.turns]
        if len(found) < samples:
            missing = next(s for s, row in enumerate(rows) if row is None or not row.turns)
            raise ConfigError(
                f"workload.path = {self.origin}: it holds no trajectory {group}.{missing}; wanted: fewer run.iterations,"
                " or the rollout.groups_per_iteration and trajectories_per_group that it was made with"
            )
        prompts = [row.prompt_tokens for row in found if row.prompt_tokens]
        return GroupWork(
            prompt_tokens=prompts[0] if prompts else w.prompt_tokens,
            turns=[tuple(row.turns) if w.agents is None else _redrawn(row.turns, w.agents, tool) for row in found],
            rewards=[drawn if row.reward is None else row.reward for row, drawn in zip(found, rewards)],
            reward_s=[drawn if row.reward_s is None else row.reward_s for row, drawn in zip(found, seconds)],
        )


def _redrawn(turns: list[TurnWork], agents: Agents, tool: Iterator[float]) -> Turns:
    """The same turns, other tool times; one that nothing answered took none."""
    return tuple(
        replace(turn, tool_s=agents.tool_s * math.exp(agents.tool_sigma * next(tool)) if turn.answer_tokens else 0.0)
        for turn in turns
    )


def from_run(workload: Workload, seed: int) -> Replayed:
    """Turns, lengths and rewards of a run's event logs; an iteration that was interrupted counts as it was done last."""
    assert workload.path is not None
    seen: dict[tuple[int, int, int], _Seen] = {}
    try:
        for attempt in attempts(Path(workload.path)):
            evaluating = 0
            for record in read(attempt):
                evaluating = _take(record, seen, evaluating)
    except RunError as error:
        raise ConfigError(f"workload.path: {error}") from None
    return Replayed(workload, seed, workload.path, seen)


def _take(record: dict[str, Any], seen: dict[tuple[int, int, int], _Seen], evaluating: int) -> int:
    kind = record["kind"]
    if kind == "RolloutRequested":
        iteration = record["iteration"] if record["purpose"] == "eval" else 0
        for spec in record["groups"]:
            for sample in range(record["trajectories_per_group"]):
                seen[iteration, spec["group"], sample] = _Seen(prompt_tokens=spec["prompt_tokens"])
        return iteration if record["purpose"] == "eval" else evaluating
    if kind in ("TurnFinished", "ToolFinished", "TrajectoryScored"):
        group, sample = record["trajectory"]
        row = seen.setdefault((evaluating if group < 0 else 0, group, sample), _Seen())
        if kind == "TurnFinished":
            row.turns.append(TurnWork(max(record["output_tokens"], 1)))
        elif kind == "ToolFinished":
            answer_tokens, tool_s = record["observation_tokens"], record["t"] - record["started_t"]
            row.turns[-1] = replace(row.turns[-1], answer_tokens=answer_tokens, tool_s=tool_s)
        else:
            row.reward = record["reward"]
    return evaluating


def from_trace(workload: Workload, seed: int) -> Replayed:
    """Raises ConfigError that names the line."""
    assert workload.path is not None
    seen: dict[tuple[int, int, int], _Seen] = {}
    try:
        with open(workload.path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    _trace_line(f"{workload.path}:{number}", line, seen)
    except OSError as error:
        raise ConfigError(f"workload.path = {workload.path}: cannot be read: {error.strerror}") from None
    return Replayed(workload, seed, workload.path, seen)


def _trace_line(where: str, line: str, seen: dict[tuple[int, int, int], _Seen]) -> None:
    try:
        row = json.loads(line)
        values = _Seen(row.get("prompt_tokens"), _trace_turns(row), row.get("reward"), row.get("reward_s"))
        seen[0, int(row["group"]), int(row["sample"])] = values
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: not a trajectory: {error}; wanted: group, sample, output_tokens") from None


def _trace_turns(row: dict[str, Any]) -> list[TurnWork]:
    """One number, or lists with one entry a turn; the last turn's answer and tool time may be left out."""
    outputs, answers, seconds = (_listed(row.get(key, ())) for key in ("output_tokens", "answer_tokens", "tool_s"))
    if not outputs or max(len(answers), len(seconds)) > len(outputs) or len(answers) < len(outputs) - 1:
        raise ValueError(f"{len(outputs)} output_tokens, {len(answers)} answer_tokens, {len(seconds)} tool_s")
    if min(outputs) < 1:
        raise ValueError(f"output_tokens {min(outputs)}")
    return [
        TurnWork(int(tokens), int(answer or 0), float(tool_s or 0.0))
        for tokens, answer, tool_s in zip_longest(outputs, answers, seconds[: len(outputs)])
    ]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]

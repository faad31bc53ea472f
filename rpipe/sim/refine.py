"""Does a fitted profile, simulated, give back the runs that it was fitted to? What is off by a factor is put right.

Each run is simulated with its own config and lengths. Figures are compared with its log, and each moves one thing:

    wait for a burst's first token, by the burst's size      request_s, request_each_s
    rollout_s                                                all of the engine's costs, by one factor
    train_busy_s                                             all of a micro-batch's costs, by one factor
    a group's way from SendGroup to GroupArrived             group_s

The rates' dependence on batch and tokens stays as it was fitted. First iterations are left out: caches and pages are cold.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpipe import config as configs
from rpipe.analysis.metrics import Attempt
from rpipe.analysis.run import Record, attempts, read
from rpipe.sim.fit import burst_line, bursts
from rpipe.sim.job import SimulatedJob
from rpipe.sim.observe import Seen, observed
from rpipe.sim.run import Memory

ROUNDS = 5
LEFT_OUT = 1
Profile = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """Medians of one run, real or simulated (the mean for `arrival_s`); None where there was nothing."""

    bursts: list[tuple[int, float]]
    rollout_s: float | None
    train_busy_s: float | None
    arrival_s: float | None


def refine(profile: Profile, runs: Sequence[Path]) -> tuple[Profile, dict[str, float]]:
    """The profile put right, and the largest error that is left of each figure, a share. Raises ConfigError."""
    profile = copy.deepcopy(profile)
    real = [told(list(read(attempts(run)[-1]))) for run in runs]
    left: dict[str, float] = {}
    for _ in range(ROUNDS):
        twins = [told(_simulated(profile, run)) for run in runs]
        pairs = list(zip(real, twins))
        (base_s, each_s), (twin_base_s, twin_each_s) = (
            burst_line([p for t in side for p in t.bursts]) for side in (real, twins)
        )
        _move(profile, "request_s", base_s - twin_base_s)
        _move(profile, "request_each_s", each_s - twin_each_s)
        _move(profile, "group_s", _gap(pairs, lambda t: t.arrival_s))
        _scale(profile["engine"], _factor(pairs, lambda t: t.rollout_s))
        _scale(profile["trainer"], _factor(pairs, lambda t: t.train_busy_s))
        left = {
            name: max((abs(getattr(b, name) / getattr(a, name) - 1) for a, b in pairs if getattr(a, name)), default=0.0)
            for name in ("rollout_s", "train_busy_s")
        }
    return profile, left


def told(records: Sequence[Record]) -> Told:
    seen: Seen = observed(records)
    rows = [at.figures() for _, at in sorted(Attempt.of(records).iterations.items()) if at.complete]
    rows = rows[LEFT_OUT:] or rows
    return Told(
        bursts=bursts(seen),
        rollout_s=_median([row["rollout_s"] for row in rows]),
        train_busy_s=_median([row["train_busy_s"] for row in rows]),
        arrival_s=statistics.mean([end - start for start, end in seen.groups]) if seen.groups else None,
    )


def _simulated(profile: Profile, run: Path) -> list[Record]:
    own = configs.load(run / "config.yaml").model_dump(mode="json")
    workload = {"lengths": "run", "path": str(run)}
    rollout, training = Memory(), Memory()
    SimulatedJob(configs.parse({**own, "hardware": profile, "workload": workload}, str(run)), rollout, training).run()
    return [*rollout.records(), *training.records()]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _both(pairs: list[tuple[Told, Told]], of: Callable[[Told], float | None]) -> list[tuple[float, float]]:
    found = [(of(real), of(twin)) for real, twin in pairs]
    return [(a, b) for a, b in found if a and b]


def _gap(pairs: list[tuple[Told, Told]], of: Callable[[Told], float | None]) -> float:
    """How much longer it really took."""
    values = _both(pairs, of)
    return statistics.mean(a - b for a, b in values) if values else 0.0


def _factor(pairs: list[tuple[Told, Told]], of: Callable[[Told], float | None]) -> float:
    values = _both(pairs, of)
    return math.exp(statistics.mean(math.log(a / b) for a, b in values)) if values else 1.0


def _move(profile: Profile, key: str, seconds: float) -> None:
    profile[key] = _short(max(profile[key] + seconds, 0.0))


def _scale(costs: dict[str, Any], factor: float) -> None:
    for key, value in costs.items():
        costs[key] = [[n, _short(s * factor)] for n, s in value] if isinstance(value, list) else _short(value * factor)


def _short(value: float) -> float:
    return float(f"{value:.4g}")

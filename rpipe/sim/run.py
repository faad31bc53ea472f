"""What would a job of this config do? The API of the simulator.

    from rpipe import config
    from rpipe.sim.run import simulate

    result = simulate(config.load("configs/quickstart.yaml", ["run.iterations=5"]))
    result.medians["rollout_to_train_end_s"], result.iterations[0]["waiting_ratio_busy"]

`simulate(config)` keeps everything in memory and touches no file; with `run_dir` it writes what a job writes (config.yaml and
attempt-1/events), so that report, trace, story and replay work on it. `source` replaces config.workload. The figures are
`rpipe.analysis.metrics`' own, those of docs/event-log.md. Raises config.ConfigError, one line, where the config cannot be
simulated. The same config and seed give the same log, byte for byte.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rpipe import config as configs
from rpipe.analysis.metrics import Attempt
from rpipe.analysis.run import Record, read
from rpipe.config import Config
from rpipe.core.eventlog import EventLog
from rpipe.core.events import Command, Event
from rpipe.sim.calibration import calibrated, described
from rpipe.sim.job import SimulatedJob
from rpipe.sim.workload import Source


class Memory:
    """A log that is not written."""

    def __init__(self) -> None:
        self.kept: list[tuple[float, str, Event | Command]] = []

    def event(self, event: Event) -> None:
        self.kept.append((event.t, "event", event))

    def command(self, t: float, command: Command) -> None:
        self.kept.append((t, "command", command))

    def records(self) -> Iterator[Record]:
        """As analysis.run.read gives them."""
        for t, io, body in self.kept:
            yield {"v": 1, "io": io, **msgspec.to_builtins(body), "t": t}


@dataclass(frozen=True, slots=True)
class Result:
    """`iterations`: one row each, of the iterations that completed; `medians` over them (docs/event-log.md)."""

    iterations: list[dict[str, Any]]
    medians: dict[str, float | None]
    attempt: Attempt
    seconds: float  # virtual
    wall_s: float
    actions: int  # of the kernel
    retractions: int  # requests that the engines took back for want of KV cache


Watch = Callable[[SimulatedJob], None]


def simulate(config: Config, run_dir: Path | None = None, source: Source | None = None, watch: Watch | None = None) -> Result:
    """`watch` is called now and then while it runs."""
    began = time.perf_counter()
    if run_dir is None:
        logs = (Memory(), Memory())
        job = _run(SimulatedJob(config, *logs, source), watch)
        attempt = Attempt.of(record for log in logs for record in log.records())
    else:
        job = SimulatedJob(config, _Unopened(), _Unopened(), source)  # refused before anything is written
        events = run_dir / "attempt-1" / "events"
        events.mkdir(parents=True)
        (run_dir / "config.yaml").write_text(configs.dump(config))
        with EventLog(events, 0) as rollout, EventLog(events, config.cluster.rollout_ranks) as training:
            job.rollout.log, job.training.log = rollout, training
            rollout.note(0.0, "Simulated", hardware=described(config), calibrated=calibrated(config))
            _run(job, watch)
            rollout.note(job.kernel.now, "JobEnded", reason="")
        attempt = Attempt.of(read(run_dir / "attempt-1"))
    rows = [at.figures() for _, at in sorted(attempt.iterations.items()) if at.complete]
    return Result(
        iterations=rows,
        medians=medians(rows),
        attempt=attempt,
        seconds=job.kernel.now,
        wall_s=time.perf_counter() - began,
        actions=job.kernel.actions,
        retractions=sum(engine.retractions for engine in job.rollout.engines),
    )


def medians(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    keys = [key for key in (rows[0] if rows else {}) if key != "iteration"]
    columns = {key: [row[key] for row in rows if row[key] is not None] for key in keys}
    return {key: float(statistics.median(column)) if column else None for key, column in columns.items()}


def _run(job: SimulatedJob, watch: Watch | None) -> SimulatedJob:
    collecting = gc.isenabled()
    gc.disable()  # it would search a growing heap again and again, and what is made here has no cycles worth it
    try:
        job.run(None if watch is None else lambda: watch(job))
    finally:
        if collecting:
            gc.enable()
    return job


class _Unopened:
    """Stands for a log until its file may be made."""

    def event(self, event: Event) -> None:
        raise AssertionError("nothing happens before the log is open")

    def command(self, t: float, command: Command) -> None:
        raise AssertionError("nothing happens before the log is open")

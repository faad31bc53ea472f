"""A run under faults: started, hit, looked at, started again, on one machine or on the test cluster."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from rpipe.core.eventlog import records
from tests.job.jobs import ROOT, command, config, environment

ROLLOUT_RANKS, TRAINING_RANKS = 2, 2
COORDINATOR = ROLLOUT_RANKS  # of training
START_S = 240.0  # a job's first step, on a loaded machine
END_S = 120.0


def tree(real: bool, **limits: float) -> dict[str, Any]:
    """Two engines, two training ranks, a checkpoint an iteration, far more iterations than anyone waits for."""
    made = config(
        run={"name": "faults", "iterations": 100_000, "seed": 3, "checkpoint_every_iterations": 1, "keep_checkpoints": 2},
        cluster={"rollout_ranks": ROLLOUT_RANKS, "training_ranks": TRAINING_RANKS},
        limits={"message_s": 60, "collective_s": 60, "start_s": 200, "heartbeat_s": 2, **limits},
    )
    if real:
        made["engine"] = {"kv_tokens": 8192, "max_running": 8, "stream_interval_tokens": 4}
    return made


class Run:
    """One run directory and its attempts. Steps and checkpoints are read from the event log, as they are written."""

    coordinator = COORDINATOR  # of training: whose log is read

    def __init__(self, folder: Path, config_tree: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "run"
        self.config = folder / "run.yaml"
        self.config.write_text(yaml.safe_dump(config_tree))
        self.job: subprocess.Popen[str] | None = None

    @property
    def attempt(self) -> int:
        return max((int(p.name.removeprefix("attempt-")) for p in self.path.glob("attempt-*")), default=0)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def start(self, *overrides: str) -> None:
        """The next attempt, on this machine."""
        before = self.attempt
        self.job = subprocess.Popen(
            command(self.config, self.path, *overrides), cwd=ROOT, env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.until("the next attempt", lambda: self.attempt > before, 60.0)

    def until(self, what: str, holds: Callable[[], bool], within_s: float = START_S) -> float:
        """When it did hold (monotonic); AssertionError where it did not in time, or the job ended first."""
        end = time.monotonic() + within_s
        while not holds():
            if self.job is not None and self.job.poll() is not None and not holds():
                raise AssertionError(f"the job ended before {what}: {self.job.communicate()[0][-3000:]}")
            assert time.monotonic() < end, f"no {what} within {within_s:g} s; {self.log_tail()}"
            time.sleep(0.05)
        return time.monotonic()

    def log_tail(self) -> str:
        logs = sorted(self.path.glob("attempt-*/job.log"))
        return logs[-1].read_text(errors="replace")[-3000:] if logs else "no job.log"

    def events(self, kind: str, attempt: int | None = None, rank: int | None = None) -> list[dict[str, Any]]:
        rank = self.coordinator if rank is None else rank
        path = self.path / f"attempt-{attempt or self.attempt}" / "events" / f"rank{rank:05d}.jsonl"
        return [r for r in records(path) if r["kind"] == kind] if path.exists() else []

    def steps_since_checkpoint(self, attempt: int | None = None) -> int:
        """Optimizer steps that the attempt finished and that no checkpoint of it holds."""
        saved = self.events("CheckpointSaved", attempt)
        after = saved[-1]["t"] if saved else -1.0
        return sum(r["t"] > after for r in self.events("StepDone", attempt))

    def wait_for_steps(self, count: int = 1, checkpoints: int = 1) -> None:
        """The newest attempt has done so many, and saved as often."""
        self.until(
            f"{count} steps and {checkpoints} checkpoints of attempt {self.attempt}",
            lambda: len(self.events("StepDone")) >= count and len(self.events("CheckpointSaved")) >= checkpoints,
        )

    def rank(self, number: int) -> psutil.Process:
        assert self.job is not None
        for process in psutil.Process(self.job.pid).children(recursive=True):
            if process.environ().get("OMPI_COMM_WORLD_RANK") == str(number) and "rpipe.train" in " ".join(process.cmdline()):
                return process
        raise AssertionError(f"no rank {number}")

    def ends(self, code: int, within_s: float = END_S) -> str:
        """The line that says why; the job must leave with `code`."""
        assert self.job is not None
        text, _ = self.job.communicate(timeout=within_s)
        assert self.job.returncode == code, text[-3000:]
        found = re.findall(r"^run ended: (.*?)(?:; see .*)?$", text, re.MULTILINE)
        assert len(found) == (1 if code else 0), text[-3000:]
        return found[0] if found else ""

    def resumes(self, *overrides: str) -> float:
        """Start again; the time of its first step. It must go on from the newest whole checkpoint, with nothing skipped."""
        saved = [int(p.name.removeprefix("iteration-")) for p in self.checkpoints.glob("iteration-??????")]
        self.start(*overrides)
        moment = self.until("the first step", lambda: bool(self.events("StepDone")))
        resumed = self.events("Resumed")[0]["iteration"]
        assert resumed in saved, (resumed, saved)
        return moment

    def stop(self) -> None:
        if self.job is not None and self.job.poll() is None:
            self.job.terminate()
            self.job.communicate(timeout=END_S)


def lost_steps(run: Run, attempt: int) -> str:
    """What attempt `attempt` had finished and the next one did again."""
    count = run.steps_since_checkpoint(attempt)
    if not count:
        return "nothing"
    return f"{count} step{'' if count == 1 else 's'} since the last checkpoint, done again"

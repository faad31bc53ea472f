"""How does a test run whole jobs on the cluster? As a person does: sbatch slurm/train.sbatch CONFIG key=value ..."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rpipe.core.eventlog import records
from tests.slurm.cluster import Cluster, ClusterError

TRAIN, HETJOB = "slurm/train.sbatch", "slurm/train_hetjob.sbatch"


class Submitted:
    """One job, its run folder and what it printed."""

    def __init__(self, cluster: Cluster, folder: Path, tree: dict[str, Any], *words: str, script: str = TRAIN) -> None:
        """`words`: sbatch's arguments, before the script. The run's folder is made by the job."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(yaml.safe_dump(tree))
        self.cluster, self.run_dir, self._output = cluster, folder / "run", folder / "output"
        asked = ["--output", str(self._output), *words, script, str(folder / "run.yaml"), f"run.dir={self.run_dir}"]
        self.number = cluster.submit(*asked)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def completes(self, timeout_s: float) -> Submitted:
        """Until the job is over; a test fails here with what it printed unless it COMPLETED."""
        try:
            state = self.cluster.wait(self.number, timeout_s)
        except ClusterError as error:
            state = str(error)
        logs = [path.read_text(errors="replace")[-3000:] for path in sorted(self.run_dir.glob("attempt-*/job.log"))[-1:]]
        assert state == "COMPLETED", "\n".join([state, self.output[-6000:], *logs])
        return self

    def until(self, what: str, holds: Callable[[], bool], timeout_s: float = 150.0) -> None:
        end = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < end, f"no {what} within {timeout_s:g} s\n{self.output[-6000:]}"
            time.sleep(0.2)

    def events(self, rank: int, kind: str, attempt: int = 1) -> list[dict[str, Any]]:
        path = self.run_dir / f"attempt-{attempt}" / "events" / f"rank{rank:05d}.jsonl"
        return [r for r in records(path) if r["kind"] == kind] if path.exists() else []

    def kinds(self) -> set[str]:
        """Of everything in the event log."""
        return {r["kind"] for path in self.run_dir.glob("attempt-*/events/*.jsonl") for r in records(path)}

    def report(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "report.json").read_text())  # type: ignore[no-any-return]

    def weights(self) -> bytes:
        return (self.run_dir / "hf" / "model.safetensors").read_bytes()

    def seats(self) -> list[tuple[str, str]]:
        """(node, role) of every rank."""
        return [(seat["node"], seat["role"]) for seat in json.loads((self.run_dir / "attempt-1/seats.json").read_text())]

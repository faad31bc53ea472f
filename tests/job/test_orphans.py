"""Ranks cut off from the rest: each ends itself within the time that docs/faults.md states, whoever else is silent."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import yaml

from rpipe.train import ABORT_S
from tests.job.jobs import ROOT, command, config, environment

MESSAGE_S, HEARTBEAT_S, COLLECTIVE_S = 15.0, 1.0, 45.0
ROLES = {0: "rollout coordinator", 1: "engine owner", 2: "training coordinator", 3: "training rank"}


@dataclass
class Job:
    """Two rollout and two training ranks on scripted engines, in training."""

    folder: Path
    process: subprocess.Popen[bytes]
    stopped: list[psutil.Process] = field(default_factory=list)
    left: dict[int, psutil.Process] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)

    @classmethod
    def start(cls, folder: Path) -> Job:
        folder.mkdir()
        tree = config(
            run={"iterations": 10_000, "checkpoint_every_iterations": 0},
            cluster={"rollout_ranks": 2, "training_ranks": 2},
            limits={"message_s": MESSAGE_S, "heartbeat_s": HEARTBEAT_S, "collective_s": COLLECTIVE_S, "start_s": 120},
        )
        (folder / "run.yaml").write_text(yaml.safe_dump(tree))
        with (folder / "out").open("wb") as out:
            words = command(folder / "run.yaml", folder / "run")
            return cls(folder, subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=out, stderr=out))

    def wait_for_a_step(self) -> None:
        log = self.folder / "run" / "attempt-1" / "events" / "rank00002.jsonl"
        end = time.monotonic() + 150
        while not (log.exists() and '"StepDone"' in log.read_text()):
            assert self.process.poll() is None and time.monotonic() < end, (self.folder / "out").read_text()
            time.sleep(0.1)

    def stop(self, cut: int) -> None:
        """That rank, and whoever could end the others: mpirun and the launcher. So it looks behind a cut link."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        for process in below:
            number = process.environ().get("OMPI_COMM_WORLD_RANK")
            if number is not None and "rpipe.train" in " ".join(process.cmdline()):
                self.left[int(number)] = process
        assert sorted(self.left) == [0, 1, 2, 3]
        starter = next(p for p in below if p.name() in ("mpirun", "prterun"))
        self.stopped = [psutil.Process(self.process.pid), starter, self.left.pop(cut)]
        for process in self.stopped:
            process.send_signal(signal.SIGSTOP)

    def look(self, began: float) -> bool:
        """Whether any still runs."""
        for rank in [rank for rank, process in self.left.items() if gone(process)]:
            self.ended_s[ROLES[rank]] = round(time.monotonic() - began, 1)
            del self.left[rank]
        return bool(self.left)

    def end(self) -> None:
        for process in [*self.stopped[1:], *self.left.values()]:
            if not gone(process):
                process.kill()
        self.process.kill()
        self.process.wait()


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.timeout(400)
def test_without_a_coordinator_and_the_launcher_every_rank_ends_itself(tmp_path: Path) -> None:
    jobs = {cut: Job.start(tmp_path / str(cut)) for cut in (0, 2)}
    try:
        for job in jobs.values():
            job.wait_for_a_step()
        for cut, job in jobs.items():
            job.stop(cut)
        began = time.monotonic()
        # a rank behind another waits for that one's end; one in a reduction for its timeout; the alarm bounds MPI's abort
        within_s = max(2 * MESSAGE_S, COLLECTIVE_S) + 3 * HEARTBEAT_S + ABORT_S + 60  # for a busy machine
        while sum(job.look(began) for job in jobs.values()) and time.monotonic() - began < within_s:
            time.sleep(0.1)
        for cut, job in jobs.items():
            print(f"without the {ROLES[cut]}: {job.ended_s}")
            assert not job.left, f"without the {ROLES[cut]}, {[ROLES[r] for r in job.left]} still run after {within_s:.0f} s"
            told = [p.read_text() for p in (job.folder / "run" / "attempt-1").glob("failure-rank*.txt")]
            assert any("heard nothing from rank" in text for text in told), told
    finally:
        for job in jobs.values():
            job.end()

"""Faults of a cluster: two of three hosts work, one is spare; the job is hit where it trains and goes on elsewhere."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.row import Row
from tests.faults.run import Run, lost_steps, tree
from tests.slurm.cluster import ENDED, Cluster, ClusterError

MESSAGE_S = 30.0  # a peer's silence; Slurm itself gives a silent host up after Cluster.silent_s, sooner
TRAINER = 1  # the only training rank


class ClusterRun(Run):
    """A run that Slurm starts, and starts again."""

    coordinator = TRAINER

    def __init__(self, cluster: Cluster, folder: Path, real: bool) -> None:
        made = tree(real, message_s=MESSAGE_S)
        made["cluster"] = {"rollout_ranks": 1, "training_ranks": 1}
        super().__init__(folder, made)
        self.cluster, self.number = cluster, 0

    def submit(self) -> None:
        output = str(self.folder / "output")
        asked = ["--output", output, "--time=60", "-N2", "slurm/train.sbatch", str(self.config), f"run.dir={self.path}"]
        self.number = self.cluster.submit(*asked)

    def state(self) -> str:
        with contextlib.suppress(ClusterError):  # a controller that is being restarted does not answer
            return self.cluster.job(self.number)["JobState"]
        return "?"

    @property
    def training_host(self) -> str:
        return str(json.loads((self.path / f"attempt-{self.attempt}" / "seats.json").read_text())[TRAINER]["node"])

    def log_tail(self) -> str:
        output = self.folder / "output"
        return (output.read_text(errors="replace")[-3000:] if output.exists() else "") + super().log_tail()

    def next_step(self, within_s: float = 120.0) -> float:
        """When the newest attempt finishes another step."""
        before = len(self.events("StepDone"))
        return self.until("another step", lambda: len(self.events("StepDone")) > before, within_s)

    def recovers(self, attempt: int, meanwhile: Callable[[], object] = bool) -> tuple[float, str]:
        """When the attempt after `attempt` finished its first step, and who started it."""
        by = "started again by Slurm"

        def stepped() -> bool:
            nonlocal by
            meanwhile()
            if self.state() in ENDED:  # a person's turn
                by = "submitted again by hand"
                self.submit()
            return self.attempt > attempt and bool(self.events("StepDone"))

        moment = self.until("a step of the next attempt", stepped)
        resumed = self.events("Resumed")[0]["iteration"]
        saved = [e["iteration"] for n in range(1, self.attempt) for e in self.events("CheckpointSaved", n)]
        assert resumed >= max(saved), (resumed, saved)  # an attempt may die between a checkpoint and its line in the log
        return moment, by


def chain(cluster: Cluster, folder: Path, real: bool) -> list[Row]:
    run = ClusterRun(cluster, folder, real)
    try:
        run.submit()
        run.wait_for_steps(6)
        rows = [controller(run), short_cut(run), taken_down(run), long_cut(run), crashed(run)]
        run.wait_for_steps()
        assert run.state() == "RUNNING"
    finally:
        cluster.run("ctl", ["scancel", str(run.number)], check=False)
    return rows


def controller(run: ClusterRun) -> Row:
    before, attempt = len(run.events("StepDone")), run.attempt
    run.cluster.restart_controller(down_s=5.0)
    steps = len(run.events("StepDone")) - before
    assert steps and run.attempt == attempt, "the job did not work on without the controller"
    run.until("the controller", lambda: run.state() == "RUNNING", 60.0)
    return Row("slurmctld killed, back after 5 s", None, None, "nothing", f"the job does not notice: {steps} steps meanwhile")


def short_cut(run: ClusterRun) -> Row:
    host, attempt, began = run.training_host, run.attempt, time.monotonic()
    run.cluster.cut(host)
    time.sleep(5.0)
    run.cluster.restore(host)
    run.next_step()
    after = run.next_step()  # the first may have been under way
    assert run.attempt == attempt
    return Row("link cut for 5 s", None, after - began, "nothing", "it waits, and goes on")


def taken_down(run: ClusterRun) -> Row:
    host, attempt, began = run.training_host, run.attempt, time.monotonic()
    run.cluster.run("ctl", ["scontrol", "update", f"nodename={host}", "state=down", "reason=fault"])
    detected = run.until("the job's end there", lambda: run.state() != "RUNNING", 60.0)
    recovered, by = run.recovers(attempt)
    run.cluster.run("ctl", ["scontrol", "update", f"nodename={host}", "state=resume"])
    idle(run, host)
    run.wait_for_steps()
    return Row("scontrol update state=down", detected - began, recovered - began, lost_steps(run, attempt), by)


def long_cut(run: ClusterRun) -> Row:
    """For at least 60 s in the whole table; the ranks behind the cut are alone, and end themselves."""
    host, attempt, began = run.training_host, run.attempt, time.monotonic()
    run.cluster.cut(host)
    detected = run.until("the job's end there", lambda: run.state() != "RUNNING", 90.0)
    moments: list[float] = []

    def orphans_ended() -> bool:
        if not moments and not ranks_on(run.cluster, host):
            moments.append(time.monotonic())
        return bool(moments)

    recovered, by = run.recovers(attempt, meanwhile=orphans_ended)
    run.until("the end of the ranks behind the cut", orphans_ended, MESSAGE_S + 60.0)
    time.sleep(max(0.0, began + 60.0 - time.monotonic()))
    run.cluster.restore(host)
    idle(run, host)
    told = f"{by}; the ranks behind the cut ended themselves after {moments[0] - began:.0f} s"
    return Row("link cut for 60 s", detected - began, recovered - began, lost_steps(run, attempt), told)


def crashed(run: ClusterRun) -> Row:
    host, attempt, began = run.training_host, run.attempt, time.monotonic()
    run.cluster.crash(host)
    detected = run.until("the job's end there", lambda: run.state() != "RUNNING", 90.0)
    recovered, by = run.recovers(attempt)
    run.cluster.boot(host)
    return Row("host crash", detected - began, recovered - began, lost_steps(run, attempt), by)


def ranks_on(cluster: Cluster, host: str) -> list[str]:
    """Processes of ranks there; the host is entered beside its network."""
    return cluster.run(host, ["pgrep", "-f", "mpi4py -m rpipe.train"], check=False).stdout.split()


def idle(run: ClusterRun, host: str) -> None:
    """The host is the spare one from now on."""
    ask = ["sinfo", "-h", "-N", "-o", "%t", "-n", host, "-p", "all"]
    run.until(f"{host} idle", lambda: "idle" in run.cluster.run("ctl", ask, check=False).stdout.split(), 90.0)

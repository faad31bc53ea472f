"""Given the same trajectories, do one host, three hosts and an interrupted run end with the same bits?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.job.jobs import config
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import HETJOB, Submitted

ITERATIONS = 12


def tree(folder: Path) -> dict[str, Any]:
    """The same run in another folder; slow while a file `slow` is there."""
    prompts = [{"prompt": f"{i}+{i + 1}=", "answer": "", "slow_while": str(folder / "slow")} for i in range(200)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    source = {"kind": "jsonl", "path": str(folder / "prompts.jsonl"), "reward": "tests.slurm.rewards:slow_while_asked"}
    return config(
        run={"iterations": ITERATIONS, "seed": 3, "checkpoint_every_iterations": 5},
        cluster={"rollout_ranks": 1, "training_ranks": 2},
        data={"train": source},
        pipeline={"mode": "exact"},
        reward={"workers": 1},
    )


@pytest.fixture(scope="module")
def uninterrupted(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    """On three hosts."""
    folder = tmp_path_factory.mktemp("three")
    return Submitted(slurm, folder, tree(folder), "-N3").completes(240)


def test_ranks_are_spread_over_the_hosts_and_the_plan_is_printed(uninterrupted: Submitted) -> None:
    assert uninterrupted.seats() == [("n1", "rollout"), ("n2", "training"), ("n3", "training")]
    assert "n3    2      0        training  replica 1" in uninterrupted.output
    hosts = [uninterrupted.events(rank, "JobStarted")[0]["host"] for rank in range(3)]
    assert hosts == ["n1", "n2", "n3"]


def test_one_host_ends_with_the_bits_of_three(uninterrupted: Submitted, cluster: Cluster, tmp_path: Path) -> None:
    one = Submitted(cluster, tmp_path, tree(tmp_path), "-N1").completes(240)
    assert {node for node, _ in one.seats()} == {"n1"}
    assert one.weights() == uninterrupted.weights()


@pytest.mark.timeout(600)
def test_preempted_and_stopped_at_its_time_limit_it_goes_on_by_itself_to_the_same_bits(
    uninterrupted: Submitted, cluster: Cluster, tmp_path: Path
) -> None:
    """First a job in another partition takes the hosts (Slurm's TERM), then the limit comes near (Slurm's USR2)."""
    slow = tmp_path / "slow"
    slow.touch()
    job = Submitted(cluster, tmp_path, tree(tmp_path), "-N3", "--signal=B:USR2@180", "--time=120")
    job.until("first step", lambda: bool(job.events(1, "StepDone")))
    urgent = cluster.submit("-p", "urgent", "-N3", "--exclusive", "-o", f"{tmp_path}/urgent", "--wrap=true")
    assert cluster.wait(urgent, 150) == "COMPLETED"

    job.until("first step of the second attempt", lambda: bool(job.events(1, "StepDone", 2)))
    near = _minutes(cluster, job.number) + 3  # two to three minutes from now
    cluster.run("ctl", ["scontrol", "update", f"jobid={job.number}", f"timelimit={near}"])
    job.until("third attempt", lambda: (job.run_dir / "attempt-3").exists())
    slow.unlink()
    cluster.run("ctl", ["scontrol", "update", f"jobid={job.number}", "timelimit=120"])
    job.completes(240)

    assert job.output.count("slurm/job.sh: stopped at a safe point: requeue") == 2
    assert "no safe point" not in job.output
    assert job.weights() == uninterrupted.weights()
    trained = [e["group"] for attempt in (1, 2, 3) for e in job.events(1, "GroupArrived", attempt)]
    assert set(trained) == set(range(ITERATIONS * 8))
    assert job.report()["attempts"] == 3


@pytest.mark.timeout(600)
def test_a_heterogeneous_job_that_is_asked_to_stop_is_started_again_whole(
    uninterrupted: Submitted, cluster: Cluster, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    job = Submitted(cluster, tmp_path, tree(tmp_path), "-N1", ":", "-N2", script=HETJOB)
    job.until("first step", lambda: bool(job.events(1, "StepDone")))
    cluster.run("ctl", ["scancel", "--batch", "--signal=USR2", str(job.number)])
    job.until("word of the stop", lambda: bool(job.events(1, "StopRequested")))
    slow.unlink()
    job.completes(240)
    assert job.output.count("slurm/job.sh: stopped at a safe point: requeue") == 1
    assert job.seats() == uninterrupted.seats() and job.report()["attempts"] == 2
    assert job.weights() == uninterrupted.weights()


def _minutes(cluster: Cluster, job: int) -> int:
    """Whole minutes that the job has run since its last start."""
    hours, minutes, _ = cluster.job(job)["RunTime"].split(":")
    return int(hours) * 60 + int(minutes)


def test_a_job_that_does_not_fit_ends_at_once_with_its_own_exit_code(cluster: Cluster, tmp_path: Path) -> None:
    one_each = {**tree(tmp_path), "cluster": {"rollout_ranks": 1, "training_ranks": 2, "devices_per_node": 1}}
    job = Submitted(cluster, tmp_path, one_each, "-N2")
    assert cluster.wait(job.number, 90) == "FAILED"
    assert cluster.job(job.number)["ExitCode"] == "2:0"
    assert "do not fit on 2 nodes of 1 devices; wanted: sbatch --nodes=3" in job.output
    assert not job.run_dir.exists()

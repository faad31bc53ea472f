"""What do the batch scripts do with signals and exit codes? The real ones, with stand-ins for launch.sh and scontrol."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A checkout whose launch.sh does what the test writes into `launch`, and a Slurm that says RUNNING."""
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")
    program(tmp_path / "scontrol", 'echo "$@" >> asked; echo "JobId=1 JobState=$(cat state) "')
    program(tmp_path / "srun", 'echo "$@" > probed; [ ! -e dead ]')
    (tmp_path / "state").write_text("RUNNING")
    return tmp_path


def program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def start(site: Path, launch: str, *words: str, script: str = "train.sbatch", **extra: str) -> subprocess.Popen[str]:
    program(site / "launch.sh", launch)
    env = {"PATH": f"{site}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(site), "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1"}
    return subprocess.Popen(
        ["bash", str(site / "slurm" / script), *words], env={**env, **extra}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def requeued(site: Path) -> bool:
    asked = site / "asked"
    return asked.exists() and "requeue 1" in asked.read_text()


def until(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.01)


@pytest.mark.parametrize("script", ["train.sbatch", "train_hetjob.sbatch"])
@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_the_jobs_exit_code_is_the_scripts_and_75_requeues(site, code, script):
    job = start(site, f"exit {code}", "c.yaml", script=script)
    job.communicate(timeout=20)
    assert job.returncode == code
    assert requeued(site) == (code == 75)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_the_time_limit_and_preemption_stop_the_job_at_a_safe_point_and_requeue(site, number):
    launch = "trap 'touch stopping; sleep 0.3; exit 75' USR2; touch up; while :; do sleep 0.05; done"
    job = start(site, launch, "c.yaml")
    until(site / "up")
    os.kill(job.pid, number)
    job.communicate(timeout=20)
    assert (site / "stopping").exists() and job.returncode == 75 and requeued(site)


@pytest.mark.parametrize("node", ["answers", "is gone"])
def test_a_failed_job_is_requeued_only_if_a_node_is_gone(site, node):
    if node == "is gone":
        (site / "dead").touch()
    assert start(site, "exit 1", "c.yaml", SLURM_JOB_NUM_NODES="3").wait(20) == 1
    assert requeued(site) == (node == "is gone")
    assert (site / "probed").read_text().startswith("--ntasks=3 --ntasks-per-node=1 ")


def test_a_cancelled_job_is_told_to_end_and_not_requeued(site):
    job = start(site, "trap 'exit 143' TERM; touch up; while :; do sleep 0.05; done", "c.yaml")
    until(site / "up")
    (site / "state").write_text("CANCELLED")
    os.kill(job.pid, signal.SIGTERM)
    job.communicate(timeout=20)
    assert job.returncode == 143 and not requeued(site)


def test_a_job_that_finds_no_safe_point_is_requeued_before_the_limit(site):
    job = start(
        site, "trap '' USR2; touch up; until grep -qs requeue asked; do sleep 0.05; done; exit 9", "c.yaml", "limits.notice_s=2"
    )
    until(site / "up")
    os.kill(job.pid, signal.SIGUSR2)
    text = job.communicate(timeout=20)[0]
    assert ("no safe point within 1 s: requeue" in text, job.returncode, requeued(site)) == (True, 9, True), text


def test_a_signal_before_the_job_listens_is_no_failure(site):
    job = start(site, "kill -USR2 $$; sleep 5", "c.yaml")
    job.communicate(timeout=20)
    assert requeued(site)


def test_arguments_reach_the_job_and_name_the_array_task(site):
    words = ["c.yaml", "run.seed=%a", "data.train.template=two words", "limits.notice_s=30"]
    job = start(site, 'printf "<%s>" "$@" > told', *words, SLURM_ARRAY_TASK_ID="7")
    assert job.wait(20) == 0
    told = (site / "told").read_text()
    assert told == "<c.yaml><limits.notice_s=30><run.seed=7><data.train.template=two words><limits.notice_s=30>"


def test_the_site_is_that_of_the_environments_accelerator(site):
    (site / ".venv").mkdir()
    (site / ".venv/stamp").write_text("/x run npu abc\n")
    (site / "slurm/env/site.sh").write_text("export MINE=1\n")
    assert start(site, 'echo "$HCCL_EXEC_TIMEOUT $MINE $no_proxy" > told', "c.yaml", no_proxy="a.b").wait(20) == 0
    assert (site / "told").read_text() == "600 1 127.0.0.1,localhost,a.b\n"

"""A step that Slurm could not launch is launched again; a job that failed is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpipe.runtime import launch
from rpipe.runtime.cause import not_launched
from rpipe.runtime.rundir import RunDir
from rpipe.runtime.supervise import Outcome

# Slurm 22.05, a step number that an earlier start still holds on n1
REFUSED = """srun: launch/slurm: launch_p_step_launch: StepId=2.0 aborted before step completely launched.
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: task 0 launch failed: Unspecified error
srun: error: n3: task 1: Killed
"""
KILLED = "srun: error: n3: task 1: Killed\n"


def test_slurms_own_refusal_is_told_from_a_killed_rank():
    assert not_launched(REFUSED) and not not_launched(KILLED)


def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *logs: str) -> tuple[Outcome, int]:
    """The outcome, and how often the job was started; each start writes the next of `logs` and fails, but an empty one."""
    run = RunDir(tmp_path, 1)
    run.attempt_path.mkdir(exist_ok=True)
    starts = iter(logs)
    count = 0

    def job(*_: Any) -> Outcome:
        nonlocal count
        count += 1
        text = next(starts)
        with (run.attempt_path / "job.log").open("a") as log:
            log.write(text)
        return Outcome(1, "it failed") if text else Outcome(0, "")

    monkeypatch.setattr(launch, "_job", job)
    monkeypatch.setattr(launch, "AGAIN_S", 0.0)
    unused: Any = object()
    return launch._launched(unused, unused, unused, run, "module"), count


def test_a_refused_launch_is_tried_again_until_it_runs(tmp_path, monkeypatch):
    assert launched(tmp_path, monkeypatch, REFUSED, REFUSED, "") == (Outcome(0, ""), 3)


def test_a_job_that_failed_after_a_refused_launch_has_failed(tmp_path, monkeypatch):
    assert launched(tmp_path, monkeypatch, REFUSED, KILLED) == (Outcome(1, "it failed"), 2)


def test_tries_end_after_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "LAUNCH_WITHIN_S", -1.0)
    assert launched(tmp_path, monkeypatch, REFUSED) == (Outcome(1, "it failed"), 1)


def test_ranks_that_have_run_are_not_started_again(tmp_path, monkeypatch):
    (tmp_path / "attempt-1" / "events").mkdir(parents=True)
    assert launched(tmp_path, monkeypatch, REFUSED) == (Outcome(1, "it failed"), 1)

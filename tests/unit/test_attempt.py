"""What the launcher writes about an attempt, for whoever reads the run later."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpipe.runtime import attempt
from rpipe.runtime.rundir import RunDir


def test_an_attempt_that_ended_says_when_where_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SLURM_JOB_ID", "41"), ("SLURM_RESTART_COUNT", "2"), ("SLURM_JOB_NODELIST", "n[1-3]")):
        monkeypatch.setenv(name, value)
    run = RunDir(tmp_path, 3)
    run.attempt_path.mkdir()
    begun = attempt.begin(run)
    running = attempt.read(run.attempt_path)
    assert running is not None and running.ended_unix_s is None and running.code is None
    attempt.end(run, begun, 1, "rank 1 was killed by signal 9")
    told = attempt.read(run.attempt_path)
    assert told is not None and told.ended_unix_s is not None
    assert (told.attempt, told.job, told.restart, told.nodes) == (3, "41", 2, "n[1-3]")
    assert (told.code, told.cause) == (1, "rank 1 was killed by signal 9")
    assert told.ended_unix_s >= told.started_unix_s
    assert [entry.name for entry in run.attempt_path.iterdir()] == ["attempt.json"]


def test_an_attempt_without_the_file_has_none(tmp_path: Path) -> None:
    assert attempt.read(tmp_path) is None

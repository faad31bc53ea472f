"""A run directory on a filesystem that several hosts share: whose claim stands, and when is it over?"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from rpipe.runtime import claim as claims
from rpipe.runtime.claim import Claim, claim, owner
from rpipe.runtime.mpirun import LaunchError
from tests.unit.test_launch_run_dir import config


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def elsewhere(path: Path, silent_s: float = 0.0, **facts: object) -> None:
    """Attempt 1 of another host, which last touched its claim so long ago."""
    (path / "attempt-1").mkdir(parents=True)
    facts = {"attempt": 1, "process": 7, "host": "n9", "kernel": "another", **facts}
    (path / "claim.json").write_bytes(msgspec.json.encode(facts))
    touched = (path / "claim.json").stat().st_mtime - silent_s
    os.utime(path / "claim.json", (touched, touched))


def slurm(monkeypatch: pytest.MonkeyPatch, says: str, code: int = 0, error: str = "") -> None:
    def squeue(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[0] == "squeue" and command[3] == "41"
        return subprocess.CompletedProcess(command, code, says, error)

    monkeypatch.setattr(claims.subprocess, "run", squeue)


def test_a_claim_that_another_host_touched_just_now_stands(tmp_path):
    elsewhere(tmp_path, 30.0)
    with pytest.raises(
        LaunchError, match=r"in use by process 7 on n9; wanted: another run\.dir, or wait 60 s if that host died"
    ):
        with claim(config(str(tmp_path))):
            pass


def test_a_claim_that_nobody_touched_for_a_minute_is_over(tmp_path):
    elsewhere(tmp_path, 61.0)
    with claim(config(str(tmp_path))) as (run, _):
        assert run.attempt == 2 and owner(tmp_path).attempt == 2


def test_a_claim_that_ended_is_over_at_once(tmp_path):
    elsewhere(tmp_path, ended=True)
    with claim(config(str(tmp_path))) as (run, _):
        assert run.attempt == 2


def test_on_the_same_machine_the_lock_decides(tmp_path):
    elsewhere(tmp_path, kernel=claims._kernel())  # touched just now, but its process holds no lock any more
    with claim(config(str(tmp_path))) as (run, _):
        assert run.attempt == 2


def test_a_filesystem_without_locks_still_refuses_a_second_job(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "_take", lambda lock: None)
    with claim(config(str(tmp_path))):
        with pytest.raises(LaunchError, match=rf"in use by process {os.getpid()} on "):
            with claim(config(str(tmp_path))):
                pass
    with claim(config(str(tmp_path))) as (run, _):
        assert run.attempt == 2


@pytest.mark.parametrize("says", ["RUNNING\n", "COMPLETING\n"])
def test_a_job_that_slurm_runs_keeps_its_claim_however_silent(tmp_path, monkeypatch, says):
    elsewhere(tmp_path, 1e4, job="41")
    slurm(monkeypatch, says)
    with pytest.raises(LaunchError, match=r"in use by process 7 on n9 \(Slurm job 41\); wanted: another run\.dir$"):
        with claim(config(str(tmp_path))):
            pass


@pytest.mark.parametrize(
    "told", [("", 0, ""), ("", 1, "slurm_load_jobs error: Invalid job id specified"), ("PENDING\n", 0, "")]
)
def test_a_job_that_slurm_no_longer_runs_has_lost_its_claim(tmp_path, monkeypatch, told):
    elsewhere(tmp_path, 0.0, job="41")
    slurm(monkeypatch, *told)
    with claim(config(str(tmp_path))) as (run, _):
        assert run.attempt == 2


def test_a_slurm_that_does_not_answer_leaves_the_decision_to_the_touches(tmp_path, monkeypatch):
    elsewhere(tmp_path, 30.0, job="41")
    slurm(monkeypatch, "", 1, "Unable to contact slurm controller")
    with pytest.raises(LaunchError, match="in use"), claim(config(str(tmp_path))):
        pass


def test_a_job_that_slurm_started_again_takes_over_from_itself_even_from_an_orphan_with_the_lock(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    with claim(config(str(tmp_path))) as (orphan, _):
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        with claim(config(str(tmp_path))) as (run, _):
            assert run.attempt == 2
            assert "taking over from attempt 1: Slurm started job 41 again" in capfd.readouterr().err
            with pytest.raises(claims.ClaimLost):
                claims.require(orphan)
        assert owner(tmp_path).ended
    assert owner(tmp_path).attempt == 2, "the orphan's end changes nothing"


def test_a_second_start_inside_one_slurm_job_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    with claim(config(str(tmp_path))):
        with pytest.raises(LaunchError, match=r"in use by process \d+ on .* \(Slurm job 41\)"), claim(config(str(tmp_path))):
            pass


def test_the_owner_touches_its_claim_and_a_displaced_one_ends_its_job(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT_S", 0.01)
    asked = []
    monkeypatch.setattr(claims.os, "kill", lambda pid, number: asked.append(number))
    with claim(config(str(tmp_path))):
        old = 1e9
        os.utime(tmp_path / "claim.json", (old, old))
        wait(lambda: (tmp_path / "claim.json").stat().st_mtime > old)
        claims._write(tmp_path, Claim(2, 1, "n2", "k"))
        wait(lambda: bool(asked))
    assert owner(tmp_path) == Claim(2, 1, "n2", "k")


def test_a_filesystem_that_stutters_stops_neither_the_touching_nor_the_end(tmp_path, monkeypatch):
    """A claim that is not touched any more would be another host's in a minute."""
    monkeypatch.setattr(claims, "BEAT_S", 0.01)
    failed: list[int] = []

    def stale(path: Path) -> Claim | None:
        failed.append(1)
        if len(failed) < 4:
            raise OSError(116, "Stale file handle")
        return owner(path)

    with claim(config(str(tmp_path))):
        monkeypatch.setattr(claims, "owner", stale)
        os.utime(tmp_path / "claim.json", (1e9, 1e9))
        wait(lambda: (tmp_path / "claim.json").stat().st_mtime > 1e9)
        failed.clear()
        monkeypatch.setattr(claims, "BEAT_S", 1e6)
    assert owner(tmp_path) is not None


def wait(happened) -> None:
    end = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)

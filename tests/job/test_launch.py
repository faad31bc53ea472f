"""A job under watch: every way to end, with real mpirun, real signals, and nothing left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.job, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 5
PATIENT_S = 60  # where a job that waited so long would fail the test
CONFIG = """
model: {make: {}}
engine: {kind: scripted}
data: {train: {kind: sums}}
limits: {stop_s: STOP}
run: {dir: DIR, resume: RESUME}
"""
DRIVE = (
    "import sys\nfrom rpipe.runtime.launch import train\n"
    "sys.exit(train(sys.argv[1], sys.argv[2:], report=lambda path: 'the report', module='launch_ranks'))"
)


@dataclass
class Job:
    process: subprocess.Popen[str]
    run: Path
    tag: str

    def wait_up(self) -> None:
        end = time.monotonic() + 60
        while not all((self.run / "attempt-1" / f"up{rank}").exists() for rank in (0, 1)):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, "ranks not up after 60 s"
            time.sleep(0.05)

    def finish(self, timeout_s: float = 60) -> tuple[int, str, str, float]:
        """(exit code, stdout, stderr, seconds until then)."""
        began = time.monotonic()
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err, time.monotonic() - began

    def left(self) -> list[str]:
        """Command lines of processes of this job that still run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"RPIPE_TEST_TAG={self.tag}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found


def start(tmp_path: Path, case: str, resume: str = "auto", stop_s: int = STOP_S) -> Job:
    run = tmp_path / "run"
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.replace("DIR", str(run)).replace("RESUME", resume).replace("STOP", str(stop_s)))
    tag = uuid.uuid4().hex
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'job'}", "RPIPE_TEST_CASE": case, "RPIPE_TEST_TAG": tag}
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVE, str(file)],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Job(process, run, tag)


def test_a_normal_end_prints_the_run_dir_first_and_last_and_returns_0(tmp_path: Path) -> None:
    job = start(tmp_path, "normal")
    code, out, err, _ = job.finish()
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == lines[-1] == f"run dir: {job.run}"
    assert lines[1].startswith("R 16 groups x K 8")
    assert {"rank 0 of 2 up", "rank 1 of 2 up"} <= set(lines)
    assert "terminal=None threads=1" in lines  # a pipe is no terminal
    log = (job.run / "attempt-1" / "job.log").read_text()
    assert "rank 1 of 2 up" in log and "to stderr" in log
    assert not job.left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_ranks_at_a_safe_point_and_all_they_leave(tmp_path: Path, number: signal.Signals, code: int) -> None:
    job = start(tmp_path, "long", stop_s=PATIENT_S)
    job.wait_up()
    job.process.send_signal(number)
    got, out, err, seconds = job.finish()
    assert got == code
    assert "rank 0 stopped" in out and "rank 1 stopped" in out
    assert err.count("run ended:") == 1
    assert seconds < PATIENT_S
    assert not job.left()


def test_ranks_that_ignore_a_stop_are_ended_in_bounded_time(tmp_path: Path) -> None:
    job = start(tmp_path, "deaf")
    job.wait_up()
    job.process.send_signal(signal.SIGTERM)
    code, _, _, seconds = job.finish()
    assert code == 143
    assert STOP_S <= seconds < STOP_S + 30
    assert not job.left()


def test_a_second_ctrl_c_does_not_wait_for_the_safe_point(tmp_path: Path) -> None:
    job = start(tmp_path, "deaf", stop_s=PATIENT_S)
    job.wait_up()
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    job.process.send_signal(signal.SIGINT)
    code, _, _, seconds = job.finish()
    assert code == 130
    assert seconds < PATIENT_S / 2
    assert not job.left()


def test_usr2_is_passed_on_and_the_end_is_the_jobs_own(tmp_path: Path) -> None:
    job = start(tmp_path, "long")
    job.wait_up()
    job.process.send_signal(signal.SIGUSR2)
    code, out, err, _ = job.finish()
    assert (code, err) == (0, "")
    assert "rank 0 stopped" in out and "rank 1 stopped" in out
    assert not job.left()


def test_a_killed_rank_is_named_in_one_message(tmp_path: Path) -> None:
    job = start(tmp_path, "long")
    job.wait_up()
    os.kill(int((job.run / "attempt-1" / "up1").read_text()), signal.SIGKILL)
    code, _, err, seconds = job.finish()
    assert code == 1
    assert len(err.splitlines()) == 1
    assert err.startswith("run ended: rank 1 was killed by signal 9 (training, host ")
    assert str(job.run / "attempt-1" / "job.log") in err
    assert seconds < 40
    assert not job.left()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("raises", "run ended: rank 1 (training) failed: RuntimeError: no such thing as a free lunch; see "),
        ("fails", "run ended: rank 1 (training, node here): no group for 120 s; see "),
        ("hangs after failing", "run ended: rank 1 (training, node here): engine 0 died; see "),
    ],
)
def test_a_failed_rank_is_named_with_its_own_reason(tmp_path: Path, case: str, message: str) -> None:
    job = start(tmp_path, case)
    code, out, err, seconds = job.finish()
    assert code == 1
    assert err.startswith(message) and len(err.splitlines()) == 1
    assert out.splitlines()[-1] == f"run dir: {job.run}"
    assert seconds < 30
    assert not job.left()


def test_a_killed_supervisor_takes_its_ranks_along(tmp_path: Path) -> None:
    job = start(tmp_path, "deaf")
    job.wait_up()
    job.process.kill()
    job.finish()
    end = time.monotonic() + 40
    # the engine of this test is nobody's child on purpose; what kills a real one is its own PDEATHSIG
    while [line for line in job.left() if "sleep" not in line] and time.monotonic() < end:
        time.sleep(0.1)
    assert not [line for line in job.left() if "sleep" not in line]
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"RPIPE_TEST_TAG={job.tag}".encode() in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except OSError:
            continue


def test_a_second_job_in_the_same_run_dir_is_refused_and_the_next_attempt_is_2(tmp_path: Path) -> None:
    first = start(tmp_path, "long")
    first.wait_up()
    code, _, err, _ = start(tmp_path, "normal").finish()
    assert code == 2
    assert err.startswith(f"run.dir = {first.run} is in use by process {first.process.pid} on ")
    first.process.send_signal(signal.SIGTERM)
    first.finish()
    code, _, err, _ = start(tmp_path, "normal", resume="never").finish()
    assert code == 2 and "run.resume = never, but" in err and "holds 1 attempt;" in err
    code, out, _, _ = start(tmp_path, "normal").finish()
    assert code == 0 and out.startswith(f"run dir: {first.run} (attempt 2)")
    assert not first.left()

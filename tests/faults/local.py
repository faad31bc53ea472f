"""Faults on one machine, one after another in one run directory: each attempt goes on from what the fault left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.faults.row import Row
from tests.faults.run import END_S, Run, lost_steps, tree
from tests.job.jobs import ROOT, command, environment

SMALL_DISK_BYTES = 64 << 20


def chain(folder: Path, real: bool) -> list[Row]:
    """All of them. `real`: SGLang instead of scripted engines; the trainer is Megatron in both."""
    run = Run(folder, tree(real))
    with small_disk(run.checkpoints):
        try:
            run.start()
            run.wait_for_steps(6)
            rows = [killed(run, 3, "training rank"), killed(run, 1, "rollout rank")]
            if real:
                rows.append(engine_child(run))
            rows.append(second_job(run))
            rows.append(full_disk(run))
            rows.append(truncated(run))
        finally:
            run.stop()
    return rows


def killed(run: Run, number: int, what: str) -> Row:
    attempt, began = run.attempt, time.monotonic()
    run.rank(number).kill()
    told = run.ends(1)
    detected = time.monotonic()
    assert f"rank {number} was killed by signal 9" in told, told
    recovered = run.resumes()
    run.wait_for_steps()
    return Row(f"SIGKILL of a {what}", detected - began, recovered - began, lost_steps(run, attempt), told)


def engine_child(run: Run) -> Row:
    """SGLang's scheduler of engine 1 is killed; its rank lives."""
    attempt, began = run.attempt, time.monotonic()
    below = psutil.Process(run.rank(1).pid).children(recursive=True)
    next(p for p in below if "scheduler" in p.name() or "scheduler" in " ".join(p.cmdline())).kill()
    detected = run.until("word of the lost engine", lambda: bool(run.events("EngineLost", rank=0)), END_S)
    recovered = run.until("the engine's return", lambda: bool(run.events("EngineRestarted", rank=0)))
    run.wait_for_steps(len(run.events("StepDone")) + 1)
    assert run.attempt == attempt
    told = "its trajectories go on elsewhere from their tokens"
    return Row("SIGKILL of an engine child", detected - began, recovered - began, "nothing", told)


def second_job(run: Run) -> Row:
    """Refused, and the first one does not notice."""
    attempt, before, began = run.attempt, len(run.events("StepDone")), time.monotonic()
    words = command(run.config, run.path)
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    detected = time.monotonic()
    assert done.returncode == 2 and "is in use by process" in done.stderr, done.stderr
    assert run.attempt == attempt
    run.until("a step after the refusal", lambda: len(run.events("StepDone")) > before)
    return Row("a second job in the same run dir", detected - began, None, "nothing", short(done.stderr, run))


def full_disk(run: Run) -> Row:
    """Nothing is left for the next checkpoint; then somebody makes room."""
    before = {p.name for p in run.checkpoints.glob("iteration-??????")}
    attempt, began = run.attempt, time.monotonic()
    ballast = run.checkpoints / "ballast"
    fill(ballast)
    told = run.ends(1)
    detected = time.monotonic()
    assert "No space left on device" in told and "the run goes on from iteration-" in told, told
    kept = {p.name for p in run.checkpoints.glob("iteration-??????")}
    assert kept and {p.name for p in run.checkpoints.iterdir()} == {*kept, "ballast"}, (before, kept)
    lost = lost_steps(run, attempt)
    ballast.unlink()
    recovered = run.resumes()
    assert run.events("Resumed")[0]["checkpoint"] == max(kept)
    return Row("full disk at a checkpoint", detected - began, recovered - began, lost, short(told, run))


def truncated(run: Run) -> Row:
    """The newest checkpoint loses half of its largest file while nobody looks; then the run goes on to its normal end."""
    run.wait_for_steps(checkpoints=2)
    run.stop()
    newest, older = sorted(run.checkpoints.glob("iteration-??????"), reverse=True)[:2]
    largest = max(newest.iterdir(), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    iterations = int(newest.name[-6:]) + 1
    began = time.monotonic()
    recovered = run.resumes(f"run.iterations={iterations}")
    assert run.events("Resumed")[0]["checkpoint"] == older.name
    ends_whole(run, iterations)
    log = (run.path / f"attempt-{run.attempt}" / "job.log").read_text(errors="replace")
    line = next(x for x in log.splitlines() if "the checkpoint is damaged; going on from" in x)
    skipped = int(newest.name[-6:]) - int(older.name[-6:])
    lost = f"{skipped} iteration{'' if skipped == 1 else 's'}, done again"
    return Row("a checkpoint truncated by hand", None, recovered - began, lost, short(line, run))


def ends_whole(run: Run, iterations: int) -> None:
    """After all this every iteration was trained, and nothing but whole checkpoints is left."""
    run.ends(0)
    assert (run.path / "hf" / "model.safetensors").exists()
    trained = {r["iteration"] for n in range(1, run.attempt + 1) for r in run.events("RolloutEnded", n)}
    assert trained >= set(range(iterations)), sorted(set(range(iterations)) - trained)
    assert {p.name for p in run.checkpoints.iterdir()} == {f"iteration-{n:06d}" for n in (iterations - 1, iterations)}


def short(text: str, run: Run) -> str:
    """One line without the test's folders."""
    line = text.strip().splitlines()[0]
    return re.sub(r"process \d+ on [^;\s]+", "process N on HOST", line.replace(str(run.path), "RUN_DIR"))


# ---- a disk that can be filled


@contextlib.contextmanager
def small_disk(at: Path) -> Iterator[None]:
    """A filesystem of its own at `at`. Needs root."""
    at.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "rpipe-faults", str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def fill(file: Path) -> None:
    """All but a little of the space that is left, again and again: the job writes and removes meanwhile."""
    with file.open("ab") as out:
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            free = shutil.disk_usage(file.parent).free - (64 << 10)
            if free > 0:
                with contextlib.suppress(OSError):
                    out.write(bytes(min(free, 1 << 20)))
                    out.flush()
            else:
                time.sleep(0.01)

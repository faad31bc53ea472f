"""Which directory does this job write to, which attempt is it, and is anyone else in there?

Two nets, as neither holds alone. `RUN_DIR/lock` is locked by the supervisor while its job lives: a death frees it, but not
every shared filesystem carries locks between hosts. `RUN_DIR/claim.json` names the attempt that owns the directory; its
supervisor touches it every BEAT_S. A claim of another host is respected until its touch is EXPIRES_S old, unless Slurm knows
better: a job that runs keeps it, one that is gone or was started again has lost it. Ages are differences of the filesystem's
own times, so hosts' clocks do not matter.

Whoever claims the directory fences older attempts: `require` raises in their ranks before anything shared is written.
Every attempt keeps its own copy of the resolved config and of the environment; the run directory shows the newest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rpipe import config as configs
from rpipe.config import Config, ConfigError
from rpipe.runtime.mpirun import LaunchError
from rpipe.runtime.rundir import RunDir, settle

BEAT_S = 10.0
EXPIRES_S = 60.0  # six beats: a slow filesystem is no death
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class ClaimLost(RuntimeError):
    """Another attempt owns the run directory by now: this one must write nothing more."""


class Claim(msgspec.Struct, frozen=True):
    """Who owns a run directory, as `claim.json` says it."""

    attempt: int
    process: int
    host: str
    kernel: str  # its boot id: the same machine since the same start
    job: str = ""  # Slurm's number, "" outside
    restart: int = 0  # how often Slurm started the job again
    ended: bool = False

    @property
    def holder(self) -> str:
        return f"process {self.process} on {self.host}" + (f" (Slurm job {self.job})" if self.job else "")


def attempts(path: Path) -> list[int]:
    """Numbers of the attempts in a run directory, ascending."""
    names = [re.fullmatch(r"attempt-(\d+)", entry.name) for entry in path.glob("attempt-*")]
    return sorted(int(found.group(1)) for found in names if found)


def owner(path: Path) -> Claim | None:
    """Of a run directory; None where nobody claimed it."""
    try:
        return msgspec.json.decode((path / "claim.json").read_bytes(), type=Claim)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def require(run: RunDir) -> None:
    """Raises ClaimLost unless `run`'s attempt owns its directory."""
    now = owner(run.path)
    if now is not None and now.attempt > run.attempt:
        raise ClaimLost(
            f"attempt {run.attempt} lost {run.path} to attempt {now.attempt} ({now.holder}): it writes nothing more there"
        )


@contextmanager
def claim(config: Config) -> Iterator[tuple[RunDir, Config]]:
    """Own the run directory and make the next attempt; yields the config with `run.dir` filled (absolute), as written there.

    Raises LaunchError: not writable, in use by another job, with attempts although run.resume = never, or with checkpoints none
    of which is whole.
    """
    try:
        path = Path(config.run.dir).absolute() if config.run.dir else _fresh(config.run.name)
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise LaunchError(f"run.dir = {error.filename}: cannot be written: {error.strerror}") from None
    try:
        _refuse_if_used(path, _take(lock))
        run, config = _next_attempt(path, config)
        mine = _write(path, Claim(run.attempt, os.getpid(), os.uname().nodename, _kernel(), *_slurm()))
        try:
            with _beating(path, mine, lock):
                yield run, config
        finally:
            with contextlib.suppress(OSError):  # how the job ended matters more
                if owner(path) == mine:
                    _write(path, msgspec.structs.replace(mine, ended=True))
    finally:
        os.close(lock)


def _next_attempt(path: Path, config: Config) -> tuple[RunDir, Config]:
    before = attempts(path)
    if before and config.run.resume == "never":
        held = f"{len(before)} attempt{'s' if len(before) > 1 else ''}"
        raise LaunchError(f"run.resume = never, but {path} holds {held}; wanted: another run.dir, or run.resume=auto to go on")
    run = RunDir(path, before[-1] + 1 if before else 1)
    try:
        run.put_back()
        if found := run.checkpoints_found():
            _same_run(run, config)
            if config.run.resume == "auto":
                _one_whole(found)
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(path)})})
        run.attempt_path.mkdir()
        for place in (run.config, run.attempt_path / "config.yaml"):
            settle(place, configs.dump(config).encode(), run.attempt)
    except OSError as error:
        raise LaunchError(f"run.dir = {path}: cannot be written: {error.strerror}") from None
    return run, config


def _one_whole(found: Sequence[Path]) -> None:
    from rpipe.runtime import checkpoints  # here: it asks this module whose the run is

    try:
        checkpoints.require_one(found)
    except checkpoints.Damaged as error:
        raise LaunchError(str(error)) from None


def _same_run(run: RunDir, config: Config) -> None:
    """Refuse to go on from a checkpoint with what gives prompts and group numbers another meaning."""
    try:
        begun = configs.load(run.config)
    except ConfigError:
        return  # of an older release, say: the checkpoint itself will tell
    for section, key in (("run", "seed"), ("rollout", "groups_per_iteration"), ("data", "train"), ("data", "shuffle")):
        was, now = (getattr(getattr(c, section), key) for c in (begun, config))
        if was != now:
            shown = f" = {now}, begun with {was}" if isinstance(now, int) else " differs from what this run began with"
            raise LaunchError(f"{section}.{key}{shown}; wanted: the same, or another run.dir than {run.path}")
    if config.most_groups != begun.most_groups:  # by it groups are numbered
        raise LaunchError(
            f"with rollout.over_sampling = {config.rollout.over_sampling:g} and refill_groups = {config.rollout.refill_groups}"
            f" an iteration may draw {config.most_groups} groups, begun with {begun.most_groups};"
            f" wanted: the same, or another run.dir than {run.path}"
        )


def _fresh(name: str) -> Path:
    """runs/NAME-JOB inside a Slurm job, where a requeued one finds its own again; else runs/NAME-TIMESTAMP. Made: two starts
    within a second, or in one job, get different ones."""
    label = os.environ.get("SLURM_ARRAY_JOB_ID", "")
    label = f"{label}_{os.environ['SLURM_ARRAY_TASK_ID']}" if label else _slurm()[0]
    base = (Path("runs") / f"{name}-{label or time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if label and _slurm()[1] and base.is_dir():
        return base
    for number in range(1, 100):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise LaunchError(f"run.dir: {base} and 98 more exist; wanted: a run.dir of your own")


# ---- is anyone else in there?


def _take(lock: int) -> bool | None:
    """Whether this process holds the lock now; None where the filesystem has none."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise


def _refuse_if_used(path: Path, locked: bool | None) -> None:
    """Raises LaunchError where another job's claim stands."""
    held = owner(path)
    job, restart = _slurm()
    if held is not None and job and held.job == job and held.restart < restart:
        if not held.ended:
            _say(f"taking over from attempt {held.attempt}: Slurm started job {job} again")
        return  # what Slurm started again is dead, or an orphan that `require` keeps out
    if locked is False:
        raise LaunchError(_in_use(path, held))
    if held is None or held.ended or (locked and held.kernel == _kernel()):
        return  # on one machine the lock tells
    alive = None if held.job == job else _slurm_runs(held.job)
    if alive or (alive is None and _silent_s(path) < EXPIRES_S):
        died = "" if alive else f", or wait {EXPIRES_S:.0f} s if that host died"
        raise LaunchError(_in_use(path, held) + died)


def _in_use(path: Path, held: Claim | None) -> str:
    return f"run.dir = {path} is in use by {held.holder if held else 'another job'}; wanted: another run.dir"


def _silent_s(path: Path) -> float:
    """Since the owner's last touch, by the filesystem's own clock."""
    probe = path / f".probe-{os.uname().nodename}-{os.getpid()}"
    try:
        probe.touch()
        return probe.stat().st_mtime - (path / "claim.json").stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _slurm_runs(job: str) -> bool | None:
    """Whether Slurm says that a job may still write; None where there is no saying."""
    if not job:
        return None
    try:
        command = ["squeue", "--noheader", "--jobs", job, "--format", "%T"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if told.returncode:
        return False if "Invalid job id" in told.stderr else None
    return told.stdout.strip() not in ("", "PENDING")


def _slurm() -> tuple[str, int]:
    """This job's number and how often Slurm started it again."""
    return os.environ.get("SLURM_JOB_ID", ""), int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0)


def _kernel() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# ---- holding it


def _write(path: Path, mine: Claim) -> Claim:
    try:
        settle(path / "claim.json", msgspec.json.encode(mine), mine.attempt)
    except OSError as error:
        if not mine.ended:
            raise LaunchError(f"run.dir = {path}: cannot be written: {error.strerror}") from None
    return mine


@contextmanager
def _beating(path: Path, mine: Claim, lock: int) -> Iterator[None]:
    """Touch the claim while the job lives; end the job where another attempt took the directory over."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a filesystem that stutters: the next beat may do
                now = owner(path)
                if now is not None and now.attempt > mine.attempt:
                    _say(f"{path} belongs to attempt {now.attempt} ({now.holder}) by now: ending attempt {mine.attempt}")
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                _take(lock)  # an orphan that held it may be gone
                os.utime(path / "claim.json")

    thread = threading.Thread(target=beat, name="claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _say(text: str) -> None:
    print(f"rpipe: {text}", file=sys.stderr, flush=True)

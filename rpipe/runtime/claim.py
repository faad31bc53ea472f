"""Which directory does this job write to, which attempt is it, and is anyone else in there?

`RUN_DIR/lock` is held by the supervisor while its job lives. Every attempt keeps its own copy of the resolved config and of
the environment; the run directory shows the newest.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rpipe import config as configs
from rpipe.config import Config, ConfigError
from rpipe.runtime.mpirun import LaunchError
from rpipe.runtime.rundir import RunDir


def attempts(path: Path) -> list[int]:
    """Numbers of the attempts in a run directory, ascending."""
    names = [re.fullmatch(r"attempt-(\d+)", entry.name) for entry in path.glob("attempt-*")]
    return sorted(int(found.group(1)) for found in names if found)


@contextmanager
def claim(config: Config) -> Iterator[tuple[RunDir, Config]]:
    """Hold the run directory and make the next attempt; yields the config with `run.dir` filled (absolute), as written there.

    Raises LaunchError: not writable, in use by another job, or with attempts although run.resume = never.
    """
    try:
        path = Path(config.run.dir).absolute() if config.run.dir else _fresh(config.run.name)
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
    except OSError as error:
        raise LaunchError(f"run.dir = {error.filename}: cannot be written: {error.strerror}") from None
    try:
        run, config = _next_attempt(path, config)
        yield run, config
    finally:
        os.close(lock)


def _next_attempt(path: Path, config: Config) -> tuple[RunDir, Config]:
    before = attempts(path)
    if before and config.run.resume == "never":
        held = f"{len(before)} attempt{'s' if len(before) > 1 else ''}"
        raise LaunchError(f"run.resume = never, but {path} holds {held}; wanted: another run.dir, or run.resume=auto to go on")
    run = RunDir(path, before[-1] + 1 if before else 1)
    if run.checkpoints_found():
        _same_run(run, config)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(path)})})
    try:
        run.attempt_path.mkdir()
        for place in (run.config, run.attempt_path / "config.yaml"):
            place.write_text(configs.dump(config))
    except OSError as error:
        raise LaunchError(f"run.dir = {path}: cannot be written: {error.strerror}") from None
    return run, config


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


def _fresh(name: str) -> Path:
    """runs/NAME-TIMESTAMP, made; two starts within a second get different ones."""
    base = (Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    for number in range(1, 100):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise LaunchError(f"run.dir: {base} and 98 more exist; wanted: a run.dir of your own")


def _lock(path: Path) -> int:
    """A descriptor that holds the directory's lock; closing it, or the death of this process, gives it back."""
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 200).decode(errors="replace").strip()
        os.close(lock)
        raise LaunchError(f"run.dir = {path} is in use by {holder or 'another job'}; wanted: another run.dir") from None
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
    return lock

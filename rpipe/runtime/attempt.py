"""When did an attempt begin and end, where, and why?

`attempt-N/attempt.json`, the launcher's own words (its ranks may have died without any). Times are seconds since 1970 on the
launcher's clock. `ended_unix_s` is null while the attempt runs, and for ever where the launcher itself was killed.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from rpipe.runtime.rundir import RunDir


class Attempt(msgspec.Struct):
    attempt: int
    started_unix_s: float
    host: str  # the launcher's
    nodes: str  # Slurm's list, or the launcher's host
    job: str  # Slurm's number, "" outside
    restart: int  # how often Slurm started the job again
    ended_unix_s: float | None = None
    code: int | None = None  # what `rpipe train` returned
    cause: str = ""  # empty at a normal end


def begin(run: RunDir) -> Attempt:
    host = os.uname().nodename
    told = os.environ.get
    return _write(
        run,
        Attempt(
            attempt=run.attempt,
            started_unix_s=time.time(),
            host=host,
            nodes=told("SLURM_JOB_NODELIST", host),
            job=told("SLURM_JOB_ID", ""),
            restart=int(told("SLURM_RESTART_COUNT", "0") or 0),
        ),
    )


def end(run: RunDir, begun: Attempt, code: int, cause: str) -> None:
    begun.ended_unix_s, begun.code, begun.cause = time.time(), code, cause
    _write(run, begun)


def read(path: Path) -> Attempt | None:
    """Of an attempt's folder; None where it has none, as those before this file did."""
    try:
        return msgspec.json.decode((path / "attempt.json").read_bytes(), type=Attempt)
    except (OSError, msgspec.DecodeError):
        return None


def _write(run: RunDir, attempt: Attempt) -> Attempt:
    new = run.attempt_path / ".attempt.json"
    with contextlib.suppress(OSError):  # a full disk must not hide how the job ended
        new.write_bytes(msgspec.json.format(msgspec.json.encode(attempt)))
        os.replace(new, run.attempt_path / "attempt.json")
    return attempt

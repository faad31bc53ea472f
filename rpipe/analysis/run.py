"""Which attempts does a run dir hold, and what do their logs say, line by line?

Nothing here keeps more than one record: a log is read as a stream, however long it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rpipe.core.eventlog import FORMAT, records

SMALL_BYTES = 1 << 15
Record = dict[str, Any]


class RunError(ValueError):
    """One line for the person who named the run."""


def attempts(run: Path) -> list[Path]:
    """`attempt-1`, `attempt-2`, ... in order. Raises RunError where `run` is no run dir."""
    if not run.is_dir():
        raise RunError(f"{run}: no such directory (wanted: a run dir, such as runs/NAME-TIMESTAMP)")
    numbered = [(int(d.name[8:]), d) for d in run.glob("attempt-*") if d.is_dir() and d.name[8:].isdigit()]
    if not numbered:
        raise RunError(f"{run}: not a run dir: it holds no attempt-1 (wanted: a run dir, such as runs/NAME-TIMESTAMP)")
    return [d for _, d in sorted(numbered)]


def files(attempt: Path) -> list[Path]:
    """One log a rank, in rank order."""
    return sorted((attempt / "events").glob("rank*.jsonl"))


def failure(attempt: Path) -> str | None:
    """Why the first rank that failed did so, or None where none left word."""
    told = [(path.stat().st_mtime_ns, path) for path in attempt.glob("failure-rank*.txt")]
    if not told:
        return None
    first = min(told)[1]
    return f"rank {int(first.stem[12:])}: {first.read_text(errors='replace').strip()}"


def launcher_said(attempt: Path) -> dict[str, Any]:
    """attempt.json: started_unix_s, ended_unix_s, cause, nodes, job ... as the launcher wrote them; empty where it did not."""
    try:
        told = msgspec.json.decode((attempt / "attempt.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return told if isinstance(told, dict) else {}


def read(attempt: Path) -> Iterator[Record]:
    """Every record of all ranks, by time. Raises RunError that names file and line of a damaged one."""
    streams: list[Iterable[Record]] = [
        # a thousand ranks write only notes: their files need not stay open
        list(_read(path)) if path.stat().st_size <= SMALL_BYTES else _read(path)
        for path in files(attempt)
    ]
    return heapq.merge(*streams, key=_time)


def _time(record: Record) -> float:
    t: float = record.get("t", 0.0)
    return t


def _read(path: Path) -> Iterator[Record]:
    number = 0
    try:
        for number, record in enumerate(records(path), 1):
            if record["v"] > FORMAT:
                raise RunError(f"{path}:{number}: format {record['v']}, written by a newer rpipe (this one reads {FORMAT})")
            yield record
    except RunError:
        raise
    except ValueError as error:
        raise RunError(str(error)) from None
    except (KeyError, TypeError):
        raise RunError(f'{path}:{number}: not a record: no "v"') from None
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None

"""Whose log is this, and what is its report?

The same shape as an rpipe run's (docs/event-log.md), so that tables, comparisons and the page take both; figures that a system
does not print are missing, and those of its own keep a name of their own.
"""

from __future__ import annotations

import re
import statistics
from itertools import islice
from pathlib import Path
from typing import Any

from rpipe.analysis.foreign import areal, slime, verl
from rpipe.analysis.foreign.lines import Unread, lines
from rpipe.analysis.run import RunError

LOOKED_AT = 200_000  # lines, until one of a known form appears
KNOWN = "a run dir of rpipe, a console log of verl or slime, verl's rollout dump, AReaL's sessions"
Report = dict[str, Any]


def system(path: Path) -> str | None:
    """ "verl", "verl dump", "slime" or "areal"; None for a run dir of ours. Raises RunError for anything else."""
    if path.is_dir():
        if any(path.glob("sessions-r*.jsonl")):
            return "areal"
        return "verl dump" if any(one.stem.isdigit() for one in path.glob("*.jsonl")) else None
    if not path.exists():
        return None  # the reader of run dirs says so
    for line in islice(lines(path), LOOKED_AT):
        if verl.STEP.search(line.text):
            return "verl"
        if slime.HEAD.search(line.text):
            return "slime"
        if re.match(r'\s*\{.*"session_id"', line.text):
            return "areal"
        if re.match(r'\s*\{.*"(output|score)"', line.text):
            return "verl dump"
    raise RunError(f"{path}: nothing in it that is known (wanted: {KNOWN})")


def report(path: Path, name: str) -> Report | None:
    """None for a run dir of ours. Raises RunError: of no known form, or nothing in it could be read."""
    kind = system(path)
    if kind is None:
        return None
    unread = Unread()
    evaluations: list[Report] = []
    time_s: dict[str, float] = {}
    if kind == "verl":
        found = verl.console(lines(path), unread)
        rows, evaluations = verl.rows(found), verl.evaluations(found)
    elif kind == "slime":
        rollouts, steps = slime.console(lines(path), unread)
        rows, evaluations = slime.rows(rollouts, steps), slime.evaluations(rollouts)
    elif kind == "verl dump":
        rows = verl.dump(_files(path, "*.jsonl"), lines, unread)
    else:
        rows, time_s = areal.sessions(_files(path, "sessions-r*.jsonl"), lines, unread)
    if not rows:
        raise RunError(f"{path}: a log of {kind}, but nothing in it could be read; {'; '.join(unread.sentences())}")
    return _shape(kind, name, rows, evaluations, time_s or _time(rows), unread)


def _files(path: Path, pattern: str) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(path.glob(pattern), key=lambda one: (int(one.stem) if one.stem.isdigit() else 0, one.name))


def _time(rows: list[Report]) -> dict[str, float]:
    """Where the steps' seconds went, as far as they are told."""
    rollout = _sum(rows, "rollout_s")
    whole = _sum(rows, "rollout_to_train_end_s")
    parts = {
        "rollout": rollout,
        "training after rollout": max(0.0, whole - rollout),
        "publishing": _sum(rows, "publish_s"),
        "saving": _sum(rows, "checkpoint_s"),
    }
    return {name: taken for name, taken in parts.items() if taken}


def _sum(rows: list[Report], key: str) -> float:
    return float(sum(row[key] for row in rows if row.get(key) is not None))


def _shape(
    kind: str, name: str, rows: list[Report], evaluations: list[Report], time_s: dict[str, float], unread: Unread
) -> Report:
    keys = [key for key in rows[0] if key not in ("iteration", "raw")]
    medians = {key: statistics.median(known) for key in keys if (known := [r[key] for r in rows if r.get(key) is not None])}
    return {
        "iterations": rows,
        "evaluations": evaluations,
        "attempts": 1,
        "run": {
            "name": name,
            "system": kind,
            "seconds": sum(time_s.values()),
            "time_s": time_s,
            "medians": medians,
            "problems": [],
            "diagnosis": [],
            "unread": unread.sentences(),
        },
    }

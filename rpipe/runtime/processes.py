"""Which processes belong to a job, and how are all of them ended?

Two nets, as neither holds alone: descendants of the supervisor (a sub-reaper, so that orphans stay its descendants), and
processes whose environment holds RPIPE_JOB (Slurm's ranks are children of slurmd; but a process that renames itself, as
SGLang's do, may overwrite its environment). Linux's /proc, this host and user.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """From now on orphaned descendants become children of this process."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def terminate_with_parent() -> None:
    """Between fork and exec: SIGTERM to the child when the thread that made it ends."""
    end_with_parent(signal.SIGTERM)


def end_with_parent(number: signal.Signals) -> None:
    """This process gets the signal when the thread that made it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def descendants(root: int) -> set[int]:
    """Pids below `root`; zombies are not counted."""
    children: dict[int, list[int]] = {}
    table = _table()
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = list(children.get(root, ()))
    while todo:
        pid = todo.pop()
        if table[pid][1] not in "ZX":
            found.add(pid)
        todo += children.get(pid, ())
    return found


def has_children(pid: int) -> bool:
    """Whether a process has any that still run."""
    return any(parent == pid and state not in "ZX" for parent, state in _table().values())


def marked(job: str) -> set[int]:
    """Pids whose environment holds RPIPE_JOB=job."""
    sign = f"RPIPE_JOB={job}".encode()
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if sign in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


def end_all(before: set[int], job: str, timeout_s: float) -> set[int]:
    """SIGKILL what is left of the job, until nothing is; returns the pids that it took. `before`: descendants not the job's."""
    taken: set[int] = set()
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        left = (descendants(os.getpid()) | marked(job)) - before - {os.getpid()}
        if not left:
            break
        for pid in left:
            send(pid, signal.SIGKILL)
        taken |= left
        time.sleep(0.02)
    return taken


def reap_orphans(before: set[int]) -> None:
    """Collect zombies that came to this process as sub-reaper."""
    for pid, (parent, state) in _table().items():
        if parent == os.getpid() and state == "Z" and pid not in before:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _table() -> dict[int, tuple[int, str]]:
    """pid -> (parent, state) of every process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            found[int(entry.name)] = (int(parent), state)
    return found

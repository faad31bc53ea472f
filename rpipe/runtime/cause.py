"""Why did the job end? One line, out of what the ranks left and what the starter printed.

In order of trust: a rank that a signal killed (it could not write anything, and the others' complaints follow from it; one
that did write, or was ended as the others of a failed rank are, is not meant), the earliest `failure-rankNNNNN.txt`, an exit
code that the starter names, the last exception in the log.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

# Open MPI 4 and 5:  ...noticed that process rank 1 with PID 4711 on node n1 exited on signal 9 (Killed).
_OMPI_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node\s+(\S+)\s+exited\s+on\s+signal (\d+)")
# Open MPI 5:  Process name: [prterun-n1-4711@1,1] \n Exit code: 3        Open MPI 4:  Process name: [[4711,1],1]
_OMPI_EXIT = re.compile(r"Process name: \[.*?,(\d+)\]\s+Exit code:\s+(\d+)")
_OMPI_ABORT = re.compile(r"MPI_ABORT was invoked on rank (\d+)")
# srun: error: n1: task 1: Killed     srun: error: n1: tasks 0-1: Exited with exit code 3
_SRUN = re.compile(r"srun: error: (\S+): tasks? (\d+)[-,\d]*: ([A-Z][a-z]+(?: [a-z]+)*)(?: (\d+))?")
_SRUN_SIGNALS = {"Killed": 9, "Aborted": 6, "Segmentation fault": 11, "Bus error": 7}  # Terminated: srun ending the others
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Refused|Timeout)(?::.*)?$")

_NOT_LAUNCHED = re.compile(r"^srun: .*(?:launch failed: |aborted before step completely launched)", re.MULTILINE)
# The starter's, for the others of a rank that failed; a failed rank's own where its abort takes too long (rpipe/train.py); the
# supervisor's, for stacks, which ends a rank that is not yet ready for it.
_AFTER_A_FAILURE = (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)

Role = Callable[[int], str]


def first_failure(attempt: Path) -> tuple[int, str] | None:
    """(rank, reason) of the earliest failure file, None where there is none."""
    files = sorted(attempt.glob("failure-rank*.txt"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    for path in files:
        rank = path.stem.removeprefix("failure-rank")
        reason = " ".join(path.read_text(errors="replace").split())
        if rank.isdigit() and reason:
            return int(rank), reason
    return None


def not_launched(log: str) -> bool:
    """Whether Slurm itself failed to start the step, so that no rank is to blame."""
    return _NOT_LAUNCHED.search(log) is not None


def explain(log: str, attempt: Path, code: int, role: Role) -> str:
    """The cause as a clause: "rank 1 was killed by signal 9 (training, host n1)". `log`: the end of the starter's stderr."""
    killed = _killed(log)
    failure = first_failure(attempt)
    if killed and (failure is None or not _follows(killed, attempt)):
        rank, number, host = killed
        return f"rank {rank} was killed by signal {number} ({role(rank)}, host {host}){_hint(number)}"
    if failure:
        rank, reason = failure
        return reason if re.match(r"rank \d+ ", reason) else f"rank {rank} ({role(rank)}): {reason}"
    exited = _exited(log)
    exception = _last_exception(log)
    if exited:
        rank, number = exited
        return f"rank {rank} ({role(rank)}) " + (f"failed: {exception}" if exception else f"exited with code {number}")
    if code < 0:
        return f"the job's starter was killed by {signal.Signals(-code).name}"
    return exception or f"the job's starter exited with code {code}"


def _killed(log: str) -> tuple[int, int, str] | None:
    found = _OMPI_SIGNAL.search(log)
    if found:
        return int(found.group(1)), int(found.group(3)), found.group(2)
    for found in _SRUN.finditer(log):
        number = _SRUN_SIGNALS.get(found.group(3))
        if number is not None:
            return int(found.group(2)), number, found.group(1)
    return None


def _follows(killed: tuple[int, int, str], attempt: Path) -> bool:
    """Whether that rank's end may be a consequence of another rank's failure."""
    return killed[1] in _AFTER_A_FAILURE or (attempt / f"failure-rank{killed[0]:05d}.txt").exists()


def _exited(log: str) -> tuple[int, int] | None:
    found = _OMPI_EXIT.search(log)
    if found:
        return int(found.group(1)), int(found.group(2))
    found = _OMPI_ABORT.search(log)
    if found:
        return int(found.group(1)), 1
    for found in _SRUN.finditer(log):
        if found.group(4):
            return int(found.group(2)), int(found.group(4))
    return None


def _last_exception(log: str) -> str | None:
    lines = [line.rstrip() for line in log.splitlines()]
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), None)


def _hint(number: int) -> str:
    return "; signal 9 is often the kernel's, out of memory" if number == signal.SIGKILL else ""

"""How does a rank start a process that never outlives it and never thinks it is a rank?

The child runs in a session of its own (so that it and all it starts can be ended as one group), without the variables by
which MPI, PMI and torch recognise a rank, and the kernel kills it when its parent goes (PDEATHSIG, Linux only). The signal
is armed by this very file, run as a script that then becomes the program: code between fork and exec would run in a copy of
a process full of MPI and torch threads.

TERM, USR1 and USR2 are blocked in the child: Slurm's srun brings them to every process of a step, and the rank decides when its
engine ends.

The kernel counts the *thread* that spawned as the parent: spawn from one that lives as long as the child should.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

MPI_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "OPAL_", "HYDRA_", "MPIR_", "MPI_LOCAL", "TORCHELASTIC_")
RANK_VARIABLES = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
)
_PR_SET_PDEATHSIG = 1
_RANKS_ONLY = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's variables without those that make a rank, and `extra` on top."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(MPI_PREFIXES) and k not in RANK_VARIABLES}
    return {**kept, **extra}


def spawn(command: Sequence[str], env: Mapping[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start `command` as described above; its output goes to `log`. An absent program exits with 127 and says so there."""
    arm = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid())]
    return subprocess.Popen(
        [*arm, *command], env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def group_alive(pid: int) -> bool:
    """Whether any process of the session that `spawn` began still runs; a zombie that nobody reaps does not count."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return any(_running_in(pid, stat) for stat in Path("/proc").glob("[0-9]*/stat"))


def _running_in(group: int, stat: Path) -> bool:
    try:
        state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return int(pgrp) == group and state not in "ZX"


def end(process: subprocess.Popen[bytes], polite_s: float, kill_s: float = 5.0) -> bool:
    """INT, up to `polite_s` for it to go, then KILL its whole group. Blocks. False where something survived even that."""
    if process.poll() is None and polite_s > 0:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(polite_s)
    deadline = time.monotonic() + kill_s
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.poll()
        if not group_alive(process.pid):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def _become(parent: int, command: Sequence[str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _RANKS_ONLY)  # inherited by the program and by all it starts
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went before the signal was armed
            sys.exit(1)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(127)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])

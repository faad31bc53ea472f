"""How does a test run real MPI ranks, bounded, and leave nothing behind?

`run_mpi(2, "tests/job/trainer_worker.py", "tp2")` runs `mpirun -n 2 python -m mpi4py SCRIPT ARGS` with this interpreter
and its environment's mpirun. A failure or a timeout shows what the ranks printed; the process group is killed either way.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from rpipe.runtime.mpirun import Starter

ROOT = Path(__file__).resolve().parents[2]


def mpirun() -> str:
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun beside this python nor on PATH"
    return found


def environment(**extra: str) -> dict[str, str]:
    """One thread a rank, loopback, no network, no compiler."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **extra,
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_mpi(n: int, script: str | Path, *args: str, timeout_s: float = 120.0, env: dict[str, str] | None = None) -> str:
    """Run `script` (relative to the repository) on n ranks; returns what they printed. AssertionError on failure or timeout."""
    starter = Starter("mpirun", mpirun())
    with starter.environment() as told:
        return _run(
            starter.command(n, [sys.executable, "-m", "mpi4py", str(ROOT / script), *args]),
            environment(**told, **(env or {})),
            timeout_s,
        )


def _run(command: list[str], env: dict[str, str], timeout_s: float) -> str:
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        raise AssertionError(f"{' '.join(command)}: not done after {timeout_s:g} s\n{output}") from None
    finally:
        _kill(process)
    assert process.returncode == 0, f"{' '.join(command)}: exit {process.returncode}\n{output}"
    return output


def _kill(process: subprocess.Popen[str]) -> None:
    """TERM lets mpirun end its ranks (they are in process groups of their own); KILL ends mpirun."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue

"""Ranks for test_launch.py: do what RPIPE_TEST_CASE says, in the way that rpipe.train's ranks end."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mpi4py import MPI

ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # die with the starter, as real ranks do
stop = False


def ask_for_stop(number: int, frame: object) -> None:
    global stop
    stop = True


def wait(seconds: float) -> None:
    end = time.monotonic() + seconds
    while not stop and time.monotonic() < end:
        time.sleep(0.05)


def main(case: str, attempt: Path) -> None:
    comm = MPI.COMM_WORLD
    rank = comm.rank
    signal.signal(signal.SIGUSR2, signal.SIG_IGN if case == "deaf" else ask_for_stop)
    if case in ("deaf", "long") and rank == 0:  # an engine in a session of its own, which nobody ends
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    comm.Barrier()
    print(f"rank {rank} of {comm.size} up", flush=True)
    (attempt / f"up{rank}").write_text(str(os.getpid()))
    if case == "normal":
        print(f"terminal={os.environ.get('RPIPE_TERMINAL')} threads={os.environ['OMP_NUM_THREADS']}", flush=True)
        print("to stderr", file=sys.stderr, flush=True)
    elif case in ("long", "deaf"):
        wait(120)
        print(f"rank {rank} stopped", flush=True)
    elif case == "raises":
        if rank == 1:
            raise RuntimeError("no such thing as a free lunch")
        wait(120)
    elif case == "fails":
        if rank == 1:
            (attempt / "failure-rank00001.txt").write_text("rank 1 (training, node here): no group for 120 s\n")
            sys.exit(3)
        wait(120)
    elif case == "hangs after failing":
        if rank == 1:
            (attempt / "failure-rank00001.txt").write_text("rank 1 (training, node here): engine 0 died\n")
        time.sleep(120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    asked = parser.parse_args()
    main(os.environ["RPIPE_TEST_CASE"], asked.run_dir / f"attempt-{asked.attempt}")

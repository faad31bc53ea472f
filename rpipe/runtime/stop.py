"""Has this rank been asked to stop at the next safe point?

USR2 asks: the launcher passes it on. TERM asks too where srun started the rank: on preemption Slurm sends it to all processes
of a step. A TERM that comes when a stop was already asked for ends the process at once; elsewhere the first one does.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from rpipe.runtime import processes

STOPPED = "stop requested"  # why a run ended that was asked to


@dataclass(slots=True)
class Stop:
    reason: str = ""  # empty, or STOPPED

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.reason = STOPPED

    def terminate(self, number: int, frame: FrameType | None) -> None:
        if self.reason:
            _leave(number)
        self.reason = STOPPED


def listen() -> Stop:
    """From now on signals are noted. To be called first of all: by default USR2 ends a process."""
    stop = Stop()
    signal.signal(signal.SIGUSR2, stop.ask)
    if "SLURM_STEP_ID" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        signal.signal(signal.SIGTERM, stop.terminate)
        processes.end_with_parent(signal.SIGKILL)
    else:
        processes.end_with_parent(signal.SIGTERM)
    return stop


def _leave(number: int) -> NoReturn:
    os._exit(128 + number)

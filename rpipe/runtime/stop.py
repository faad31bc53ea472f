"""Has this rank been asked to stop at the next safe point?

USR2 asks: the launcher passes it on. TERM asks too where srun started the rank: Slurm sends it to all processes of a step on
preemption, on scancel and at the time limit (there twice), also while a checkpoint that USR2 asked for is being written. There
it never ends the rank, as Slurm's KILL follows it in any case. Elsewhere TERM ends the process at once.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType

from rpipe.runtime import processes

STOPPED = "stop requested"  # why a run ended that was asked to


@dataclass(slots=True)
class Stop:
    reason: str = ""  # empty, or STOPPED

    def ask(self, number: int, frame: FrameType | None) -> None:
        self.reason = STOPPED


def listen() -> Stop:
    """From now on signals are noted. To be called first of all: by default USR2 ends a process."""
    stop = Stop()
    signal.signal(signal.SIGUSR2, stop.ask)
    if "SLURM_STEP_ID" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        signal.signal(signal.SIGTERM, stop.ask)
        processes.end_with_parent(signal.SIGKILL)
    else:
        processes.end_with_parent(signal.SIGTERM)
    return stop

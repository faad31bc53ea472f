"""A wait has ended without what it waited for: what was every rank doing?

Whichever rank's bounded wait ends first leaves `attempt-N/hang`, naming itself and its wait, and stays a moment. The
supervisor sees the file and sends SIGUSR1 through the starter to all ranks, on whatever host (also when a stop came to no
end). Each writes `attempt-N/stacks-rankNNNNN.txt`: the stacks of its threads (faulthandler asks for no cooperation: a rank
inside a collective answers too), then, once its main thread runs again, what it waits for and the state of its channels. A
stopped process cannot answer; that its file stays empty says so.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import time
import traceback
from types import FrameType
from typing import TextIO

from rpipe.runtime.channel import ChannelError
from rpipe.runtime.rundir import RunDir
from rpipe.runtime.world import World

ANSWER_S = 3.0  # for the supervisor's look and the ranks' answers
_WORDS = ("timed out", "timeout", "connection closed by peer", "connection reset")  # gloo's and NCCL's


class HangDump:
    """Of one rank. What a person reads beside the stacks is `world.waits()`."""

    def __init__(self, run_dir: RunDir, world: World) -> None:
        self._run_dir, self._world = run_dir, world
        run_dir.attempt_path.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = run_dir.stacks(world.rank).open("w")
        signal.signal(signal.SIGUSR1, self._tell)
        faulthandler.register(signal.SIGUSR1, self._file, all_threads=True, chain=True)

    def ask(self, error: BaseException) -> None:
        """If `error` ended a wait: write this rank's answer, ask for the others', and give them time."""
        if not ended_a_wait(error):
            return
        with contextlib.suppress(OSError):
            print(f"rank {self._world.rank} waits no longer: {error}", file=self._file)
            traceback.print_exception(type(error), error, error.__traceback__, file=self._file)
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)
            self._tell(0, None)
            self._run_dir.hang.write_text(f"rank {self._world.rank}: {error}\n")
            end = time.monotonic() + ANSWER_S
            while time.monotonic() < end and not all(map(self._answered, range(self._world.comm.size))):
                time.sleep(0.05)

    def _answered(self, rank: int) -> bool:
        path = self._run_dir.stacks(rank)
        return path.exists() and path.stat().st_size > 0

    def _tell(self, number: int, frame: FrameType | None) -> None:
        try:
            lines = self._world.waits()
        except Exception as error:  # a description must not hide what it describes
            lines = [f"cannot be described: {type(error).__name__}: {error}"]
        with contextlib.suppress(OSError):
            print(f"\nrank {self._world.rank} ({self._world.role}):", *lines, sep="\n    ", file=self._file, flush=True)


def ended_a_wait(error: BaseException) -> bool:
    """A bound that this job set, or one inside torch's collectives."""
    if isinstance(error, (TimeoutError, ChannelError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _WORDS)

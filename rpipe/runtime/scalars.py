"""How do a run's figures get to TensorBoard?

Written at once and by the caller's own thread: tensorboardX's SummaryWriter hands them to a thread, and once that has died
of a full disk the queue before it fills up and the job waits for ever. What cannot be written is said once; the job goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FLUSH_S = 10.0  # tensorboardX syncs the file on a flush: milliseconds, on a network disk more


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Scalars:
    """One event file in `directory`. `warn` gets the one line that says why nothing more is written."""

    def __init__(self, directory: Path, warn: Callable[[str], None] = _to_stderr) -> None:
        self._directory, self._warn = directory, warn
        self._writer: Any = None
        self._flushed_t = -float("inf")
        try:
            from tensorboardX.event_file_writer import EventsWriter

            directory.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(directory / "events"))
        except (ImportError, OSError) as error:
            self._off(error)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Every value under its name ("train/reward") at `step`. Never raises for a disk's sake."""
        if self._writer is None:
            return
        from tensorboardX.proto import event_pb2, summary_pb2

        entries = [summary_pb2.Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        summary = summary_pb2.Summary(value=entries)
        try:
            self._writer.write_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
            if time.monotonic() - self._flushed_t >= FLUSH_S:
                self._writer.flush()
                self._flushed_t = time.monotonic()
        except OSError as error:
            self._off(error)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                self._off(error)

    def _off(self, error: Exception) -> None:
        self._writer = None
        self._warn(f"warning: {self._directory}: no more TensorBoard scalars: {error}")

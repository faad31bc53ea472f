"""What exactly was sampled, what was it worth, and under which weights?

`trajectories/iteration-000003.parquet` holds every training trajectory of iteration 3, `iteration-000003.eval.parquet` the
held-out ones. A part is written in the background, whole or not at all; a resumed attempt that repeats an iteration
replaces its part. What cannot be written, or not any more because a newer attempt owns the run, is said once; the job goes on.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rpipe.core.types import Trajectory, TrajectoryId, VersionSpan

SCHEMA = pa.schema(
    [
        ("iteration", pa.int64()),
        ("purpose", pa.string()),
        ("group", pa.int64()),
        ("index", pa.int32()),
        ("prompt_id", pa.string()),
        ("prompt_text", pa.string()),
        ("response_text", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("finish", pa.string()),
        ("versions", pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.int64())]))),
        ("engine", pa.int32()),
        ("error", pa.string()),
    ]
)
QUEUED_PARTS = 8  # a disk that falls this far behind loses parts, not the job

Row = dict[str, Any]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class TrajectoryDump:
    """`add` rows, `flush` an iteration when it is complete, `close` at the end. Use from one thread."""

    def __init__(
        self, directory: Path, warn: Callable[[str], None] = _to_stderr, require: Callable[[], None] = lambda: None
    ) -> None:
        """`require` raises where nothing may be written any more; it is asked before each part."""
        self._directory, self._warn, self._require = directory, warn, require
        self._rows: dict[tuple[int, str], list[Row]] = {}
        self._parts: queue.Queue[tuple[Path, list[Row]] | None] = queue.Queue(QUEUED_PARTS)
        self._written: set[Path] = set()  # by this process
        self._off = False
        self._thread: threading.Thread | None = None

    def add(
        self,
        iteration: int,
        purpose: str,
        group: int,
        index: int,
        prompt_id: str,
        prompt_text: str,
        response_text: str,
        prompt_ids: Sequence[int] | np.ndarray[Any, Any],
        output_ids: Sequence[int] | np.ndarray[Any, Any],
        logprobs: Sequence[float] | np.ndarray[Any, Any],
        reward: float,
        advantage: float | None,
        finish: str,
        versions: Sequence[tuple[int, int, int]],
        engine: int,
        error: str,
    ) -> None:
        """One trajectory; kept in memory until `flush`. `versions`: (start, end, version) of response tokens."""
        if self._off:
            return
        row: Row = {
            "iteration": iteration,
            "purpose": purpose,
            "group": group,
            "index": index,
            "prompt_id": prompt_id,
            "prompt_text": prompt_text,
            "response_text": response_text,
            "prompt_ids": prompt_ids,
            "output_ids": output_ids,
            "logprobs": logprobs,
            "reward": reward,
            "advantage": advantage,
            "finish": finish,
            "versions": [{"start": start, "end": end, "version": version} for start, end, version in versions],
            "engine": engine,
            "error": error,
        }
        self._rows.setdefault((iteration, purpose), []).append(row)

    def flush(self, iteration: int) -> None:
        """Hand what was added of `iteration` to the writer; returns at once."""
        for key in [key for key in self._rows if key[0] == iteration]:
            rows = self._rows.pop(key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_parts, name="trajectory-dump", daemon=True)
                self._thread.start()
            path = self._directory / part_name(*key)
            try:
                self._parts.put_nowait((path, rows))
            except queue.Full:
                self._warn(f"warning: {path}: left out: the disk is {QUEUED_PARTS} parts behind")

    def close(self, timeout_s: float = 60.0) -> None:
        """Flush what is left and wait for the disk, at most `timeout_s`."""
        for iteration in sorted({key[0] for key in self._rows}):
            self.flush(iteration)
        if self._thread is None:
            return
        until = time.monotonic() + timeout_s
        try:
            self._parts.put(None, timeout=timeout_s)
        except queue.Full:  # join says what that means
            pass
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"warning: {self._directory}: the last parts are left out: the disk took over {timeout_s:g} s")
        self._thread = None

    def _write_parts(self) -> None:
        while (part := self._parts.get()) is not None:
            if self._off:
                continue
            path, rows = part
            try:
                self._require()
                write_part(path, rows, append=path in self._written)
                self._written.add(path)
            except Exception as error:  # a dead writer would leave `flush` before a full queue, with a false reason
                self._off = True
                self._warn(f"warning: {path}: no more trajectories are written: {error}")


def part_name(iteration: int, purpose: str) -> str:
    return f"iteration-{iteration:06d}{'' if purpose == 'train' else '.' + purpose}.parquet"


def write_part(path: Path, rows: list[Row], append: bool = False) -> None:
    """Write or replace a part; `append` keeps the rows that it holds. Raises OSError, pa.ArrowException."""
    table = pa.Table.from_pydict({name: [row[name] for row in rows] for name in SCHEMA.names}, schema=SCHEMA)
    if append:
        table = pa.concat_tables([pq.read_table(path, schema=SCHEMA), table])
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(table, draft, compression="zstd")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_trajectories(directory: Path) -> list[Row]:
    """Every row of every part, by iteration, held-out before training, then in the order added.

    `prompt_ids` and `output_ids` are int32 arrays, `logprobs` float32, `versions` tuples (start, end, version). Raises
    FileNotFoundError where there is no part.
    """
    parts = sorted(p for p in directory.glob("iteration-*.parquet"))
    if not parts:
        raise FileNotFoundError(f"{directory}: no recorded trajectories (wanted: iteration-NNNNNN.parquet)")
    rows: list[Row] = []
    for part in parts:
        for row in pq.read_table(part, schema=SCHEMA).to_pylist():
            row["prompt_ids"] = np.array(row["prompt_ids"], np.int32)
            row["output_ids"] = np.array(row["output_ids"], np.int32)
            row["logprobs"] = np.array(row["logprobs"], np.float32)
            row["versions"] = [(span["start"], span["end"], span["version"]) for span in row["versions"]]
            rows.append(row)
    return rows


def as_trajectory(row: Row) -> Trajectory:
    """What the engine gave, as the trainer takes it."""
    return Trajectory(
        id=TrajectoryId(row["group"], row["index"]),
        prompt_ids=row["prompt_ids"],
        output_ids=row["output_ids"],
        logprobs=row["logprobs"],
        versions=tuple(VersionSpan(*span) for span in row["versions"]),
        finish=row["finish"],
    )

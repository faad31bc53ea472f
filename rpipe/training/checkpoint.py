"""How does a trainer's state reach the disk whole, and come back under another layout?

megatron's dist_checkpointing, written to DIRECTORY.tmp and renamed when every rank is done: a directory by its own name
is complete. `COMPLETE` in it lists every file's size, checked before anything is read.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

COMPLETE = "complete.json"


def save(directory: Path, state: dict[str, Any]) -> None:
    """Write a sharded state; what is not sharded is rank 0's. All ranks of the default world call it, and an older
    checkpoint of that name is replaced. The directory must be on a filesystem that all of them see."""
    new = directory.with_name(directory.name + ".tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    dist.barrier()
    with _written_here(), _told(f"{directory}: cannot be written"):
        dist_checkpointing.save(state, str(new), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))
    dist.barrier()
    if dist.get_rank() == 0:
        sizes = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
        with (new / COMPLETE).open("w") as file:
            json.dump(sizes, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(new, directory)
    dist.barrier()


def load(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Read what `state` (sharded, of this layout) asks for, and all that is not sharded. ValueError where it is not whole."""
    verify(directory)
    with _told(f"{directory}: cannot be read"):
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory))
    return loaded


@contextmanager
def _told(what: str) -> Iterator[None]:
    """torch's CheckpointException holds every rank's failure and is no Exception: one line instead."""
    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise ValueError(f"{what}: {type(first).__name__}: {(str(first).splitlines() or [''])[0]}") from None


def holds(directory: Path, prefix: str) -> bool:
    """Whether it has tensors whose keys begin so."""
    verify(directory)
    return any(key.startswith(prefix) for key in dist_checkpointing.load_tensors_metadata(str(directory)))


def verify(directory: Path) -> None:
    """Raises ValueError, naming the file, unless every file is there in its full size."""
    try:
        sizes = json.loads((directory / COMPLETE).read_text())
    except FileNotFoundError:
        raise ValueError(f"{directory}: no complete checkpoint ({COMPLETE} is missing)") from None
    except ValueError:
        raise ValueError(f"{directory / COMPLETE}: damaged: it is not JSON") from None
    for name, size in sizes.items():
        path = directory / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            raise ValueError(
                f"{path}: {'missing' if found is None else f'{found} bytes'}, wanted {size}: the checkpoint is damaged"
            )


@contextmanager
def _written_here() -> Iterator[None]:
    """Write in this process. megatron would start a manager by spawn (which imports the main module again) and fork
    writers from a process full of MPI's and gloo's threads; one thread writing its own file is no slower than that."""
    writer: Any = filesystem_async.FileSystemWriterAsync
    module: Any = filesystem_async
    theirs = writer.write_preloaded_data_multiproc, module._get_write_results_queue

    def write(transforms: Any, use_msc: Any, rank: int, buckets: list[Any], results: Any) -> None:
        written: dict[int, Any] = {}
        for i, bucket in enumerate(buckets):
            mine: queue.Queue[Any] = queue.Queue()
            count: queue.Queue[Any] = queue.Queue()
            count.put(i)
            writer.write_preloaded_data(transforms, i, bucket, mine, count, use_fsync=True)
            _, written[i] = mine.get_nowait()
            if isinstance(written[i], Exception):
                raise written[i]
        results.put(written)

    writer.write_preloaded_data_multiproc, module._get_write_results_queue = staticmethod(write), queue.Queue
    try:
        yield
    finally:
        writer.write_preloaded_data_multiproc, module._get_write_results_queue = staticmethod(theirs[0]), theirs[1]

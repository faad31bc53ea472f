"""How does a trainer's state reach the disk whole, and come back under another layout?

megatron's dist_checkpointing, written to DIRECTORY.tmp and renamed when every rank is done: a directory by its own name
is complete. Every rank sums the files that it wrote; the manifest of all sums is written last, and checked, by all
ranks together, before anything is loaded (runtime/checkpoints.py).
"""

from __future__ import annotations

import os
import queue
import re
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

from rpipe.runtime.checkpoints import Damaged, NotWritten, Sum, manifest, measure, seal, sync
from rpipe.runtime.checkpoints import verify as check_sums

FULL_BYTES = 1 << 20  # less free than this: the disk is full, whatever torch's message says


def save(directory: Path, state: dict[str, Any]) -> None:
    """Write a sharded state; what is not sharded is rank 0's. All ranks of the default world call it, and an older
    checkpoint of that name is replaced. The directory must be on a filesystem that all of them see. Raises NotWritten."""
    new = directory.with_name(directory.name + ".tmp")
    with _removed_if_not_written(new, directory):
        if dist.get_rank() == 0:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
        dist.barrier()
        with _written_here():
            dist_checkpointing.save(state, str(new), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))
        dist.barrier()
        mine = {path.name: measure(path) for path in sorted(new.iterdir()) if _writer(path.name) == dist.get_rank()}
        gathered: list[dict[str, Sum]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, mine)
        if dist.get_rank() == 0:
            seal(new, {name: found for sums in gathered for name, found in sums.items()})
            shutil.rmtree(directory, ignore_errors=True)
            os.rename(new, directory)
            sync(directory.parent)
    dist.barrier()


def _writer(name: str) -> int:
    """The rank that wrote a file; what is not sharded is rank 0's."""
    found = re.match(r"__(\d+)_", name)
    return int(found.group(1)) if found else 0


def load(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Read what `state` (sharded, of this layout) asks for, and all that is not sharded. All ranks call it. Raises Damaged,
    on all of them, where it is not whole."""
    verify(directory)
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(directory))
    except CheckpointException as error:
        raise ValueError(f"{directory}: cannot be read: {_line(_first(error))}") from None
    return loaded


def holds(directory: Path, prefix: str) -> bool:
    """Whether it has tensors whose keys begin so. Raises Damaged where a file is missing or short."""
    manifest(directory)
    return any(key.startswith(prefix) for key in dist_checkpointing.load_tensors_metadata(str(directory)))


def verify(directory: Path) -> None:
    """Raises Damaged, naming a file, on all ranks or on none, unless every file is there with its bytes; each reads a share."""
    try:
        files = manifest(directory)
        told = check_sums(directory, sorted(files)[dist.get_rank() :: dist.get_world_size()], files)
    except Damaged as error:
        told = str(error)
    gathered = [""] * dist.get_world_size()
    dist.all_gather_object(gathered, told)
    for found in gathered:
        if found:
            raise Damaged(found)


@contextmanager
def _removed_if_not_written(new: Path, directory: Path) -> Iterator[None]:
    """One line for whoever reads why the job ended, and the space back: its log needs some, too."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:  # torch's own is none of Exception's
        first = _first(error) if isinstance(error, CheckpointException) else error
        full = new.parent.is_dir() and shutil.disk_usage(new.parent).free < FULL_BYTES
        shutil.rmtree(new, ignore_errors=True)
        what = getattr(first, "strerror", None) or ("No space left on device" if full else _line(first))
        raise NotWritten(f"{directory}: cannot be written: {what}") from None


def _first(error: CheckpointException) -> BaseException:
    """It holds every rank's failure."""
    failure: BaseException = next(iter(error.failures.values()))[0]
    return failure


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


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

"""How does an engine that is started again get the weights of a version that the trainer itself no longer holds?

Every published version is written as a Hugging Face folder beside the broadcast: host copies taken bucket by bucket while the
engines receive them, written by a thread while training goes on, and renamed into place when whole. An engine starts from it
as from any model, so no request can come before the weights. On disk and not in a rank's memory, because the run's folder is
seen from every host already, and because an engine's start reads a folder anyway. The newest two are kept. Iterations may be
shorter than an engine's start, so an engine links the files that it starts from to a folder of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rpipe.core.types import Version

if TYPE_CHECKING:
    import torch

    Bucket = list[tuple[str, torch.Tensor]]

KEPT = 2


class Snapshots:
    """`begin`, `add` each bucket, `end`; then the next version. One host copy of the model while a version is written.

    Without `folder` nothing is written: no engine will be started again.
    """

    def __init__(self, folder: Callable[[Version], Path] | None, source: Path, dtype: str, limit_s: float) -> None:
        self._folder, self._source, self._dtype, self._limit_s = folder, source, dtype, limit_s
        self._buckets: queue.Queue[Bucket | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._written: list[Path] = []

    def begin(self, version: Version) -> None:
        """Waits for the version before to be on the disk. Raises TimeoutError."""
        self.wait()
        self._buckets = queue.Queue()
        self._digest = hashlib.blake2b(digest_size=16)
        if self._folder is not None:
            work = (self._folder(version), self._buckets)
            self._thread = threading.Thread(target=self._write, args=work, name="snapshot", daemon=True)
            self._thread.start()

    def add(self, bucket: Bucket) -> None:
        """Copy it to the host. On the caller's thread, so that the weights may move on after it."""
        for name, tensor in bucket:
            self._digest.update(f"{name}:{_bits(tensor)};".encode())
        if self._folder is not None:
            self._buckets.put([(name, tensor.detach().to("cpu", copy=True)) for name, tensor in bucket])

    def end(self) -> str:
        """All buckets are there; returns what tells these weights from any others."""
        self._buckets.put(None)
        return self._digest.hexdigest()

    def close(self) -> None:
        """The run is over: no engine starts from them any more."""
        self.wait()
        for folder in self._written:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join(self._limit_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the snapshot of the last published version was not written within {self._limit_s:.0f} s")
            self._thread = None

    def _write(self, folder: Path, buckets: queue.Queue[Bucket | None]) -> None:
        from rpipe.training.hf import write_folder

        coming = _until_none(buckets)
        try:
            write_folder(folder, self._source, coming, self._dtype)
            self._written.append(folder)
            while len(self._written) > KEPT:
                shutil.rmtree(self._written.pop(0), ignore_errors=True)
        except Exception as error:  # the run needs it only where an engine is lost
            print(f"warning: {folder}: not written, so an engine lost now ends the run: {error}", file=sys.stderr, flush=True)
            for _ in coming:  # if any: it may have failed behind the last one
                pass


def claim(folder: Path, version: Version, own: Path) -> tuple[Path, Version] | None:
    """Link the newest snapshot in `folder`, of `version` or later, to `own`, where nobody removes it; None if none is there."""
    found = {int(path.name[-6:]): path for path in folder.glob("version-" + "[0-9]" * 6)}
    newest = max(found, default=-1)
    if newest < version:
        return None
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    try:
        for file in found[newest].iterdir():
            try:
                os.link(file, own / file.name)
            except FileNotFoundError:
                raise
            except OSError:  # a filesystem without links
                shutil.copy2(file, own / file.name)
    except FileNotFoundError:  # removed meanwhile: there is a newer one
        return None
    return own, newest


def _until_none(buckets: queue.Queue[Bucket | None]) -> Iterator[Bucket]:
    while (bucket := buckets.get()) is not None:
        yield bucket


def _bits(tensor: torch.Tensor) -> int:
    """The sum of its bits, read as integers: another for any change that training makes; at the speed of memory."""
    import torch

    return int(tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).sum(dtype=torch.int64))

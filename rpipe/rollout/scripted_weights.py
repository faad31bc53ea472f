"""Where do broadcast weights go when there is no model?

A scripted engine in a real job is a member of the trainer's broadcast like any other: it receives every tensor and drops
it, in a thread, because torch's collectives block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from rpipe.rollout.engine import EngineError, TensorSpec

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class WeightSink:
    """Counts what it got: `tensors`, `nbytes`."""

    def __init__(self, name: str, tp: int, timeout_s: float) -> None:
        self.name = name
        self.tensors = 0
        self.nbytes = 0
        self._tp, self._timeout_s = tp, timeout_s
        self._group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def join(self, address: str, port: int, world_size: int, backend: str, name: str) -> None:
        if backend != "gloo":
            raise EngineError(f"{self.name} (scripted): channel.backend = {backend}; a scripted engine wants gloo")
        if self._tp > 1:
            raise EngineError(f"{self.name} (scripted): engine.tp = {self._tp}; it joins as one member: wanted 1")
        from rpipe.runtime.side_group import side_group

        await self.leave()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{self.name} weights")

        def meet() -> dist.ProcessGroup:
            return side_group(address, port, world_size, 1, name, backend, self._timeout_s)

        self._group = await self._threaded(meet, f"join the weight broadcast at {address}:{port}")

    async def receive(self, tensors: Sequence[TensorSpec]) -> None:
        """Returns when every tensor came; only counts where no group was joined."""
        group = self._group
        if group is not None:

            def take() -> int:
                import torch
                import torch.distributed as dist

                buffers = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in tensors]
                for buffer in buffers:
                    dist.broadcast(buffer, src=0, group=group)
                return sum(buffer.nbytes for buffer in buffers)

            self.nbytes += await self._threaded(take, f"receive {len(tensors)} tensors")
        self.tensors += len(tensors)

    async def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            from rpipe.runtime.side_group import leave

            leave(group)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    async def _threaded(self, work: Callable[[], T], wish: str) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"{self.name} (scripted) could not {wish}: {str(error).splitlines()[0]}") from None

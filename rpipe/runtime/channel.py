"""How do trajectories cross between processes?

As one flat byte tensor over a torch point-to-point group (NCCL, HCCL or gloo): the arrays of `Sequences` one after the other,
then the version spans. The header (runtime.messages) goes over MPI and says how many bytes there are; both sides call in the
same order. Sends return at once and keep their tensor until it is delivered. On a host a tensor may be sent long before its
receiver asks for it; on a device such a send is a kernel that spins beside the engine's, so there the receiver says first
that it stands ready (`Channel.patient`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpipe.core.types import Sequences

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Spans = NDArray[np.int32]  # [S, 4]: trajectory in the group, start, end, version
NO_SPANS: Spans = np.zeros((0, 4), np.int32)


class ChannelError(RuntimeError):
    """What arrived is not what the header said."""


def pack(sequences: Sequences, spans: Spans = NO_SPANS) -> NDArray[np.uint8]:
    """One byte array: counts (n, T, spans, has log-probs), then the arrays."""
    head = np.array([sequences.count, sequences.tokens, len(spans), sequences.logprobs is not None], np.int32)
    parts: list[NDArray[Any]] = [
        head,
        sequences.lengths,
        sequences.prompt_lengths,
        sequences.token_ids,
        sequences.advantages,
        sequences.rewards,
        spans,
        *([] if sequences.logprobs is None else [sequences.logprobs]),
        sequences.loss_mask,  # bytes last, so that everything before stays aligned
    ]
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8).reshape(-1) for p in parts])


def unpack(data: NDArray[np.uint8]) -> tuple[Sequences, Spans]:
    """The inverse. Raises ChannelError where the size does not match its own head."""
    n, tokens, spans, has = (int(x) for x in data[:16].view(np.int32))
    wanted = 16 + 4 * (4 * n + tokens + 4 * spans + tokens * has) + tokens
    if len(data) != wanted:
        raise ChannelError(f"a group of {n} trajectories and {tokens} tokens takes {wanted} bytes, {len(data)} came")
    at = 16

    def read(kind: type[Any], count: int) -> NDArray[Any]:
        nonlocal at
        start, at = at, at + count * np.dtype(kind).itemsize
        return data[start:at].view(kind)

    lengths, prompts, ids = read(np.int32, n), read(np.int32, n), read(np.int32, tokens)
    advantages, rewards = read(np.float32, n), read(np.float32, n)
    table = read(np.int32, 4 * spans).reshape(spans, 4)
    logprobs = read(np.float32, tokens) if has else None
    return Sequences(lengths, prompts, ids, read(np.uint8, tokens), advantages, rewards, logprobs), table


def open_channel(
    where: tuple[str, int], rank: int, backend: str, device: torch.device, timeout_s: float, store: dist.Store | None = None
) -> Channel:
    """Between the coordinators: rollout's is rank 0 and serves the store, training's is rank 1. Blocks until a byte went
    each way, so that the connection (which backends make on first use) stands before anything depends on it."""
    from rpipe.runtime.side_group import side_group

    channel = Channel(side_group(where[0], where[1], 2, rank, "groups", backend, timeout_s, store), device)
    for mine in (rank == 0, rank == 1):
        if mine:
            channel.send(np.zeros(1, np.uint8), 1 - rank).wait()
        else:
            channel.receive(1, 1 - rank)
    return channel


class Sent:
    """A tensor on its way; its memory stays until `wait` returns."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> None:
        """Call once the receiver said that it has it; returns at once then."""
        self._work.wait()


class Channel:
    """Point-to-point over one torch group, None being the default world. `device` is where its backend reads."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device

    @property
    def patient(self) -> bool:
        """Whether what is sent may wait for its receiver at no cost."""
        return self._device.type == "cpu"

    def send(self, data: NDArray[np.uint8], rank: int) -> Sent:
        """`rank` is the receiver's in the group. Returns at once."""
        import torch
        import torch.distributed as dist

        tensor = torch.from_numpy(data).to(self._device)
        return Sent(dist.isend(tensor, group=self._group, group_dst=rank), tensor)

    def close(self) -> None:
        """Give the group's connections back."""
        from rpipe.runtime.side_group import leave

        if self._group is not None:
            leave(self._group)

    def receive(self, nbytes: int, rank: int) -> NDArray[np.uint8]:
        """Block until `nbytes` came from `rank`; the group's own timeout bounds the wait."""
        import torch
        import torch.distributed as dist

        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        try:
            dist.recv(tensor, group=self._group, group_src=rank)
        except RuntimeError as error:
            raise ChannelError(f"{nbytes} bytes did not come over the channel: {str(error).splitlines()[0]}") from None
        return tensor.cpu().numpy()

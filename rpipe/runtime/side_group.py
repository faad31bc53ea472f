"""How do ranks of different worlds share a torch process group?

Megatron builds its groups over the default world of the training ranks, so what crosses the roles (groups on their way,
weights) needs groups *beside* that world. The rendezvous is the one of SGLang's `init_custom_process_group`, so a member may
be an SGLang scheduler, which joins through its `/init_weights_update_group`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def weights_group(engine: int, life: int) -> str:
    """The name of one engine's update group: rank 0 is the trainer, the others are the engine's workers. Each life of an
    engine has its own, so that nothing of a lost one is met again."""
    return f"rpipe_weights.{engine}.{life}"


def serve_store(address: str, timeout_s: float) -> dist.TCPStore:
    """A store for rank 0 to serve, on a port that the kernel picks (`store.port`): one picked earlier may be taken by now."""
    return dist.TCPStore(address, 0, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def dial_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A connection of its own to a served store, also from the process that serves it: who waits over one lets nobody else
    of that connection do anything."""
    return dist.TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def side_group(
    address: str,
    port: int,
    world_size: int,
    rank: int,
    name: str,
    backend: str = "gloo",
    timeout_s: float = 120.0,
    store: dist.Store | None = None,
) -> dist.ProcessGroup:
    """Meet `world_size` members at address:port, where rank 0 serves the store: the one given, or its own.

    Works before, after and without a default world. Ranks in collectives over the group are the ones given here. Every
    wait, now and in collectives later, ends after `timeout_s`. A process is one member of a name, and may join it again after
    `leave`, in another store. Raises torch.distributed.DistError where the peers do not come.
    """
    timeout = timedelta(seconds=timeout_s)
    host = f"[{address}]" if ":" in address else address
    if store is None:
        store, rank, world_size = next(iter(dist.rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timeout)))
    store.set_timeout(timeout)
    helper: Any = c10d._new_process_group_helper
    group, _ = helper(
        world_size,
        rank,
        [],  # no ranks of a default world: this group stands for itself
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group  # type: ignore[no-any-return]


def leave(group: dist.ProcessGroup) -> None:
    """Give the group's sockets back. To be called before the interpreter ends: torch aborts the process otherwise."""
    dist.destroy_process_group(group)

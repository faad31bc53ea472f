"""Who is this rank, what time is it, and how does its role's torch world come up?

`COMM_WORLD` is split by role: ranks 0 .. rollout_ranks-1 roll out, the others train; rank 0 of each is its coordinator. One
thread owns MPI. All times in the job are seconds on rank 0's clock: every rank measures its offset once, over MPI.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import mpi4py

mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI  # noqa: E402  (the thread level must be asked for first)

from rpipe.runtime import network  # noqa: E402
from rpipe.runtime.stop import Stop  # noqa: E402

if TYPE_CHECKING:
    import torch.distributed as dist

    from rpipe.runtime.mailbox import Mailbox

Role = Literal["rollout", "training"]
PINGS = 8


class WorldError(RuntimeError):
    """The MPI world is not the one the config describes; one line says how."""


class Clock:
    """Seconds since the job's start, on rank 0's clock."""

    def __init__(self, origin: float, offset_s: float) -> None:
        self._origin = origin - offset_s
        self.offset_s = offset_s

    def __call__(self) -> float:
        return time.monotonic() - self._origin


@dataclass(slots=True)
class World:
    comm: Any  # control messages; a duplicate of COMM_WORLD
    role_comm: Any
    role: Role
    rollout_ranks: int
    clock: Clock
    host: str
    hosts: tuple[str, ...]  # of every rank
    stop: Stop
    # Set by the role: what it waits for and the state of its channels, for a person.
    waits: Callable[[], list[str]] = field(default=lambda: ["still starting"])

    @property
    def stop_reason(self) -> str:
        """Empty, or why to stop at the next safe point."""
        return self.stop.reason

    @property
    def rank(self) -> int:
        return int(self.comm.rank)

    @property
    def role_rank(self) -> int:
        return int(self.role_comm.rank)

    @property
    def role_size(self) -> int:
        return int(self.role_comm.size)

    @property
    def is_coordinator(self) -> bool:
        return self.role_rank == 0

    @property
    def training_coordinator(self) -> int:
        """Its rank in the world; rollout's is 0."""
        return self.rollout_ranks

    def address(self, interface: str | None) -> str:
        """Where others reach this rank. Raises NetworkError."""
        return network.choose(interface, self.host, self.hosts).address


def join(rollout_ranks: int, training_ranks: int, start_s: float, stop: Stop) -> World:
    """Split the world and set the clocks. Collective. Raises WorldError where sizes differ."""
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise WorldError(f"this MPI gives thread level {MPI.Query_thread()}, wanted {MPI.THREAD_SERIALIZED} (serialized)")
    world, wanted = MPI.COMM_WORLD, rollout_ranks + training_ranks
    if world.size != wanted:
        hint = " (every process is alone: was it started by another MPI's launcher?)" if world.size == 1 else ""
        raise WorldError(
            f"the MPI world has {world.size} ranks, the config wants {rollout_ranks} rollout + {training_ranks} training{hint}"
        )
    role: Role = "rollout" if world.rank < rollout_ranks else "training"
    comm = world.Dup()
    quiet_barrier(comm, start_s, "all ranks to start")
    host = socket.gethostname()
    clock = _clock(comm)
    found = World(
        comm=comm,
        role_comm=comm.Split(0 if role == "rollout" else 1, comm.rank),
        role=role,
        rollout_ranks=rollout_ranks,
        clock=clock,
        host=host,
        hosts=tuple(comm.allgather(host)),
        stop=stop,
    )
    if found.role_size != (rollout_ranks if role == "rollout" else training_ranks):
        raise WorldError(f"the {role} communicator has {found.role_size} ranks")
    return found


def end(code: int) -> NoReturn:
    """Leave MPI and the process. The interpreter's own end would race with the threads of gloo and of torch's stores, which
    now and then abort a process that has done all its work."""
    MPI.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def quiet_barrier(comm: Any, limit_s: float, what: str, mailbox: Mailbox | None = None) -> None:
    """A barrier that sleeps: MPI's own polls a core away. Raises TimeoutError naming `what`.

    With a mailbox it lasts as long as the peers live: this rank goes on telling that it does, and `limit_s` bounds silence.
    """
    request, end = comm.Ibarrier(), time.monotonic() + limit_s
    while not request.Test():
        if mailbox is not None:
            for _ in mailbox.poll():
                pass  # nothing that comes now matters any more
            mailbox.check_silence(limit_s, lambda: what)
        elif time.monotonic() > end:
            raise TimeoutError(f"rank {comm.rank}: waited {limit_s:.0f} s for {what}")
        time.sleep(0.002)


def _clock(comm: Any) -> Clock:
    """Offset to rank 0 from the quickest of a few round trips."""
    origin = time.monotonic()
    if comm.rank == 0:
        for peer in range(1, comm.size):
            for _ in range(PINGS):
                comm.recv(source=peer, tag=1)
                comm.send(time.monotonic() - origin, dest=peer, tag=1)
        return Clock(origin, 0.0)
    best_s, offset_s = float("inf"), 0.0
    for _ in range(PINGS):
        sent = time.monotonic()
        comm.send(None, dest=0, tag=1)
        remote = comm.recv(source=0, tag=1)
        trip_s = time.monotonic() - sent
        if trip_s < best_s:
            best_s, offset_s = trip_s, remote - (sent + trip_s / 2 - origin)
    return Clock(origin, offset_s)


def role_world(world: World, backend: str, interface: str | None, timeout_s: float) -> None:
    """torch.distributed's default world over this role's ranks (Megatron builds its groups over it). Collective in the role.

    Host tensors travel over gloo in it, device tensors over `backend`.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    address = world.address(interface)
    store: dist.TCPStore | None = None
    if world.is_coordinator:
        store = dist.TCPStore(address, 0, world.role_size, is_master=True, timeout=timeout, wait_for_workers=False)
    where = world.role_comm.bcast((address, store.port) if store is not None else None)
    if store is None:
        store = dist.TCPStore(where[0], where[1], world.role_size, is_master=False, timeout=timeout)
    both = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl", "hccl": "cpu:gloo,npu:hccl"}[backend]
    dist.init_process_group(both, store=store, rank=world.role_rank, world_size=world.role_size, timeout=timeout)

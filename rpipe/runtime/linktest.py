"""How fast do this allocation's nodes reach one another? One rank a node: `rpipe doctor` starts it with srun.

Every pair of nodes sends both ways, pairs without a common node at a time; then all reduce together. Over the backend that
training would use, on each node's first device. Prints one line of JSON on rank 0: {"links": [[a, b, bytes/s], ...],
"all_reduce_bytes_per_s": ..., "backend": ...}.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rpipe.config import BACKENDS
from rpipe.policy.links import rounds
from rpipe.runtime import device as devices
from rpipe.runtime import network
from rpipe.runtime import world as worlds
from rpipe.runtime.stop import listen

REPEATS = 3  # the best counts: others may use the link
TIMEOUT_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--accelerator", choices=sorted(BACKENDS), required=True)
    parser.add_argument("--interface")
    parser.add_argument("--bytes", type=int, required=True)
    asked = parser.parse_args()
    world = worlds.join(asked.ranks, 0, TIMEOUT_S, listen())
    network.settle(network.choose(asked.interface, world.host, world.hosts))
    devices.prepare(asked.accelerator)
    device = devices.select(asked.accelerator, 0)
    worlds.role_world(world, BACKENDS[asked.accelerator], asked.interface, TIMEOUT_S)
    import torch
    import torch.distributed as dist

    data = torch.zeros(asked.bytes, dtype=torch.uint8, device=device)
    mine: list[tuple[str, str, float]] = []
    for pairs in rounds(asked.ranks):
        dist.barrier()
        for a, b in pairs:
            if world.rank in (a, b):
                rate = min(_send(dist, data, world.rank, a, b, device), _send(dist, data, world.rank, b, a, device))
                if world.rank == a:
                    mine.append((world.hosts[a], world.hosts[b], rate))
    reduced = min(_reduce_s(dist, torch.zeros(asked.bytes // 4, device=device), device) for _ in range(REPEATS))
    gathered = world.comm.gather(mine)
    if gathered is not None:
        # what a ring moves over every link: 2 (n - 1) / n of the data
        rate = 2 * (asked.ranks - 1) / asked.ranks * asked.bytes / reduced
        found = [link for part in gathered for link in part]
        print(json.dumps({"links": found, "all_reduce_bytes_per_s": rate, "backend": BACKENDS[asked.accelerator]}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _send(dist: Any, data: Any, rank: int, source: int, target: int, device: Any) -> float:
    """Bytes/s from one rank to another, the best of a few; both call it."""
    best_s = float("inf")
    for _ in range(REPEATS + 1):  # the first opens the connection
        began = time.monotonic()
        if rank == source:
            dist.send(data, target)
            dist.recv(data[:1], target)
        else:
            dist.recv(data, source)
            dist.send(data[:1], source)
        devices.synchronize(device)
        best_s = min(best_s, time.monotonic() - began)
    return float(data.numel() / best_s)


def _reduce_s(dist: Any, data: Any, device: Any) -> float:
    dist.barrier()
    began = time.monotonic()
    dist.all_reduce(data)
    devices.synchronize(device)
    return time.monotonic() - began


if __name__ == "__main__":
    worlds.end(main())

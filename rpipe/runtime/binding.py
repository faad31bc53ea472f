"""On which cores may a rank and its engine run?

`cluster.bind = numa`: devices are taken to lie on the NUMA nodes in order (`nvidia-smi topo -m`, `npu-smi info -t topo`), so
rank i of n on a host gets the cores of node i x nodes / n. The owner of an engine gets those of all of its engine's ranks: the
engine's processes inherit them. srun binds nothing, as it would give a rank and its engine one core.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def cores_of(place: int, count: int, width: int, nodes: Sequence[frozenset[int]]) -> frozenset[int]:
    """For places `place` .. `place + width - 1` of `count` on a host with these NUMA nodes."""
    mine = {i * len(nodes) // count for i in range(place, min(place + width, count))}
    return frozenset().union(*(nodes[index] for index in mine))


def numa_nodes(folder: Path = NODES) -> list[frozenset[int]]:
    """Cores of every NUMA node that has some, in the kernel's order; empty where the kernel does not say."""
    found = sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    return [cores for path in found if (cores := _expand((path / "cpulist").read_text()))]


def bind(rank: int, hosts: Sequence[str], width: int) -> frozenset[int]:
    """Keep this process to its cores, of those it may use; returns them. `width`: the ranks that its engine spans, else 1."""
    here = [index for index, host in enumerate(hosts) if host == hosts[rank]]
    nodes = numa_nodes()
    allowed = frozenset(os.sched_getaffinity(0))
    cores = cores_of(here.index(rank), len(here), width, nodes) & allowed if nodes else allowed
    if cores:  # else a cgroup gave this job other cores: leave it alone
        os.sched_setaffinity(0, cores)
    return cores or allowed


def _expand(listed: str) -> frozenset[int]:
    """0-3,8 -> 0, 1, 2, 3, 8."""
    spans = [span.split("-") for span in listed.strip().split(",") if span]
    return frozenset(core for span in spans for core in range(int(span[0]), int(span[-1]) + 1))

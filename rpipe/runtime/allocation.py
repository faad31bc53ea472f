"""What did Slurm give this job, and how are the ranks spread over it?

The allocation (or the two components of a heterogeneous job: rollout, then training) -> nodes with devices -> seats
(policy/seating.py) -> srun's words and the table that a person reads at the start.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rpipe.config import Config
from rpipe.policy import seating
from rpipe.policy.seating import Node, Seat, SeatingError
from rpipe.runtime.mpirun import LaunchError
from rpipe.runtime.rundir import settle

SCONTROL_S = 30.0


@dataclass(frozen=True, slots=True)
class Component:
    """A part of an allocation: one job, or one component of a heterogeneous one."""

    names: tuple[str, ...]
    devices: int | None  # a node, where Slurm knows them


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every rank goes."""

    found: tuple[Component, ...]
    seats: list[Seat]

    def srun_words(self, program: Sequence[str]) -> list[str]:
        """srun's arguments that put every rank in its seat."""
        if len(self.found) == 1:
            return [*_spread(self.seats), *program]
        words: list[str] = []
        for k, role in enumerate(("rollout", "training")):
            words += [":"] if k else []
            words += [f"--het-group={k}", *_spread([seat for seat in self.seats if seat.role == role]), *program]
        return words

    def table(self) -> str:
        """What a person reads at the start: one line for neighbours that serve the same engine or replica."""
        rows = [("node", "ranks", "devices", "role", "serves")]
        for group in _runs(self.seats):
            first, last = group[0], group[-1]
            serves = f"{'engine' if first.role == 'rollout' else 'replica'} {first.member}"
            rows.append((first.node, _range(first.rank, last.rank), _range(first.device, last.device), first.role, serves))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in rows]
        used = {seat.node for seat in self.seats}
        idle = [name for component in self.found for name in component.names if name not in used]
        return "\n".join(lines + ([f"without work: {', '.join(idle)}"] if idle else []))

    def write(self, attempt: int, path: Path) -> None:
        """Into the attempt's folder: the ranks check it, and a reader learns what ran where. Raises OSError."""
        settle(path, msgspec.json.format(msgspec.json.encode(self.seats), indent=1) + b"\n", attempt)


def components(env: Mapping[str, str] = os.environ) -> tuple[Component, ...]:
    """Of the job this process runs in. Raises LaunchError where it has more components than roles."""
    count = int(env.get("SLURM_HET_SIZE", "1"))
    if count > 2:
        raise LaunchError(f"this heterogeneous job has {count} components; wanted: 2, rollout and training")
    suffixes = [f"_HET_GROUP_{k}" for k in range(count)] if count > 1 else [""]
    return tuple(_component(env, suffix) for suffix in suffixes)


def _component(env: Mapping[str, str], suffix: str) -> Component:
    names = _hostnames(env[f"SLURM_JOB_NODELIST{suffix}"])
    asked = env.get(f"SLURM_GPUS_PER_NODE{suffix}") or (env.get("SLURM_GPUS_ON_NODE") if not suffix else None)
    found = re.search(r"(\d+)$", asked) if asked else None  # "8" or "a800:8"
    return Component(names, int(found.group(1)) if found else None)


def _hostnames(listed: str) -> tuple[str, ...]:
    """n[1-3] -> n1, n2, n3, by the one that knows every form."""
    if not re.search(r"[\[,]", listed):
        return (listed,)
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", listed], capture_output=True, text=True, timeout=SCONTROL_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"scontrol show hostnames {listed}: {error}") from None
    return tuple(done.stdout.split())


def plan(config: Config, found: tuple[Component, ...]) -> Plan:
    """Raises LaunchError, in one line, where the job does not fit."""
    training = config.training
    both = seating.parts(
        config.cluster.rollout_ranks,
        config.engine.tp,
        config.cluster.training_ranks,
        training.tp,
        training.pp,
        training.cp,
        training.ep,
    )
    try:
        nodes = [_nodes(config, component) for component in found]
        if any(one is None for one in nodes):
            devices = seating.smallest_devices(tuple(component.names for component in found), both)
            nodes = [[Node(name, devices) for name in component.names] for component in found]
        settled: list[Any] = nodes
        apart = len(settled) == 2
        return Plan(found, seating.apart((settled[0], settled[1]), both) if apart else seating.together(settled[0], both))
    except SeatingError as error:
        raise LaunchError(str(error)) from None


def _nodes(config: Config, component: Component) -> list[Node] | None:
    """None where nothing says how many ranks a node takes."""
    asked, given = config.cluster.devices_per_node, component.devices
    if config.cluster.accelerator == "cpu" or config.cluster.share_device:
        given = None  # devices do not count the ranks
    elif given is None and asked is None:
        raise LaunchError(
            "how many devices has a node? Slurm does not say (SLURM_GPUS_ON_NODE); wanted: sbatch --gpus-per-node=8,"
            " or cluster.devices_per_node = 8"
        )
    if asked is not None and given is not None and asked > given:
        raise LaunchError(
            f"cluster.devices_per_node = {asked}, but the allocation gives {given} a node;"
            f" wanted: sbatch --gpus-per-node={asked}"
        )
    devices = asked or given
    return None if devices is None else [Node(name, devices) for name in component.names]


def _spread(seats: Sequence[Seat]) -> list[str]:
    # arbitrary: rank by rank as listed. overcommit: where ranks outnumber a node's processors (an engine needs no core a rank).
    nodes = ",".join(seat.node for seat in seats)
    return ["--overcommit", f"--ntasks={len(seats)}", "--distribution=arbitrary", f"--nodelist={nodes}"]


def _runs(seats: Sequence[Seat]) -> list[list[Seat]]:
    """Neighbours of the same node and the same engine or replica."""
    found: list[list[Seat]] = []
    for seat in seats:
        same = found and all(getattr(found[-1][-1], key) == getattr(seat, key) for key in ("node", "role", "member"))
        if same:
            found[-1].append(seat)
        else:
            found.append([seat])
    return found


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def check(path: Path, hosts: Sequence[str]) -> None:
    """Raises LaunchError where ranks are not on the hosts that the plan in `path` gave them; no plan, nothing to check."""
    if not path.exists():
        return
    apart = seating.same_grouping(msgspec.json.decode(path.read_bytes(), type=list[Seat]), hosts)
    if apart is not None:
        a, b = apart
        raise LaunchError(f"Slurm put ranks {a} and {b} on {hosts[a]} and {hosts[b]}, other than planned ({path})")

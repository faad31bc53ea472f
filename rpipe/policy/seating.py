"""On which node and device does every rank of the job sit?

Ranks are numbered rollout first. They fill the nodes in order, a rank a device, in *units* that a node must hold whole: an
engine (engine.tp ranks, one SGLang process tree) and a tensor-parallel group of training (training.tp ranks, the ones that
exchange activations in every layer). Data, pipeline and context parallelism may cross nodes.

Invariants (tests/unit/test_seating.py): every rank once, in order; no device twice; no unit on two nodes; devices of a node are
used from 0 without a gap. What does not fit is refused in one line that says what would.
Cost: O(ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["rollout", "training"]


class SeatingError(ValueError):
    """The job does not fit its nodes; one line says what would."""


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    devices: int


@dataclass(frozen=True, slots=True)
class Part:
    """One role's ranks. `unit` neighbours stay in one node; `run` neighbours serve the same of `members` engines, replicas."""

    role: Role
    ranks: int
    unit: int
    run: int
    members: int

    @property
    def unit_name(self) -> str:
        return "engine.tp" if self.role == "rollout" else "training.tp"


@dataclass(frozen=True, slots=True)
class Seat:
    rank: int
    node: str
    device: int  # of the node, from 0
    role: Role
    member: int  # engine of rollout, replica of training (ranks in lockstep)


def parts(rollout_ranks: int, engine_tp: int, training_ranks: int, tp: int, pp: int, cp: int, ep: int = 1) -> tuple[Part, Part]:
    """Training ranks in Megatron's order: tensor, context, expert, data, pipeline; so a replica's pipeline stages lie apart."""
    replicas = training_ranks // (tp * pp * cp * ep)
    return (
        Part("rollout", rollout_ranks, engine_tp, engine_tp, rollout_ranks // engine_tp),
        Part("training", training_ranks, tp, tp * cp * ep, replicas),
    )


def together(nodes: Sequence[Node], both: tuple[Part, Part]) -> list[Seat]:
    """Both roles over one allocation: training goes on where rollout ended. Raises SeatingError."""
    free = _Free(nodes)
    rollout, training = both
    seats = free.fill(rollout, 0, both)
    return seats + free.fill(training, rollout.ranks, both)


def apart(nodes: tuple[Sequence[Node], Sequence[Node]], both: tuple[Part, Part]) -> list[Seat]:
    """Rollout on the first component of a heterogeneous job, training on the second. Raises SeatingError."""
    rollout, training = both
    seats = _Free(nodes[0]).fill(rollout, 0, (rollout,))
    return seats + _Free(nodes[1]).fill(training, rollout.ranks, (training,))


def smallest_devices(names: tuple[Sequence[str], ...], both: tuple[Part, Part]) -> int:
    """How many ranks a node takes where devices do not say it (CPU): as few as fit, so that all nodes are used."""
    most = sum(part.ranks for part in both)
    for devices in range(1, most):
        try:
            nodes = tuple([Node(name, devices) for name in group] for group in names)
            apart((nodes[0], nodes[1]), both) if len(nodes) == 2 else together(nodes[0], both)
        except SeatingError:
            continue
        return devices
    return most


def same_grouping(seats: Sequence[Seat], hosts: Sequence[str]) -> tuple[int, int] | None:
    """Two ranks that the plan has together and the world apart, or the other way round; None where they agree."""
    node_of: dict[str, str] = {}
    first: dict[str, int] = {}
    for seat, host in zip(seats, hosts, strict=True):
        if node_of.setdefault(host, seat.node) != seat.node:
            return first["host " + host], seat.rank
        if seat.node in first and hosts[first[seat.node]] != host:
            return first[seat.node], seat.rank
        first.setdefault("host " + host, seat.rank)
        first.setdefault(seat.node, seat.rank)
    return None


class _Free:
    """What is left of some nodes, in their order."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = list(nodes)
        self._at, self._used = 0, 0

    def fill(self, part: Part, first_rank: int, whole: tuple[Part, ...]) -> list[Seat]:
        seats: list[Seat] = []
        while len(seats) < part.ranks:
            while self._at < len(self._nodes) and self._used + part.unit > self._nodes[self._at].devices:
                self._at, self._used = self._at + 1, 0
            if self._at == len(self._nodes):
                raise SeatingError(self._refusal(part, whole))
            node = self._nodes[self._at]
            for _ in range(part.unit):
                index = len(seats)
                seats.append(Seat(first_rank + index, node.name, self._used, part.role, index // part.run % part.members))
                self._used += 1
        return seats

    def _refusal(self, part: Part, whole: tuple[Part, ...]) -> str:
        widest = max((node.devices for node in self._nodes), default=0)
        if part.unit > widest:
            return f"{part.unit_name} = {part.unit} does not fit into one node of {widest} devices; wanted: at most {widest}"
        wanted = " and ".join(f"cluster.{p.role}_ranks = {p.ranks} ({p.unit_name} {p.unit})" for p in whole)
        count = len(self._nodes)
        have = f"{count} node{'s' if count > 1 else ''} of {widest} devices"
        return f"{wanted} do not fit on {have}; wanted: sbatch --nodes={_nodes_needed(widest, whole)}"


def _nodes_needed(devices: int, whole: tuple[Part, ...]) -> int:
    """How many nodes of so many devices take these parts."""
    node, used = 1, 0
    for part in whole:
        for _ in range(part.ranks // part.unit):
            if used + part.unit > devices:
                node, used = node + 1, 0
            used += part.unit
    return node

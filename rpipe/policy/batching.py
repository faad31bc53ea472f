"""Batching: which trajectories share a micro-batch, and which replica trains them?

The unit of training work is the trajectory. Two questions, both answered from token counts alone:
- `owners`: a fixed split over data-parallel replicas that depends on nothing but the trajectories (exact and serial mode);
- `take`: the next micro-batch for a replica that pulls (fifo mode).

Invariants (tests/property/test_batching.py asserts each):
- every trajectory lands in exactly one micro-batch;
- a micro-batch exceeds the budget only if it holds a single trajectory;
- without `span_groups`, a micro-batch holds one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rpipe.core.types import GroupId


class Item(NamedTuple):
    """One trajectory waiting to be trained."""

    group: GroupId
    sample: int
    tokens: int


def owners(items: Sequence[Item], replicas: int) -> list[list[Item]]:
    """Longest first onto the replica with the fewest tokens; each share is back in the given order."""
    shares: list[list[tuple[int, Item]]] = [[] for _ in range(replicas)]
    load = [0] * replicas
    for at, item in sorted(enumerate(items), key=lambda pair: (-pair[1].tokens, pair[0])):
        replica = min(range(replicas), key=lambda r: (load[r], r))
        shares[replica].append((at, item))
        load[replica] += item.tokens
    return [[item for _, item in sorted(share)] for share in shares]


def take(items: Sequence[Item], budget_tokens: int, span_groups: bool) -> int:
    """How many of the first items form the next micro-batch: at least one, at most what fits the budget."""
    total = 0
    for count, item in enumerate(items):
        total += item.tokens
        if count and (total > budget_tokens or (not span_groups and item.group != items[0].group)):
            return count
    return len(items)


def pack(items: Sequence[Item], budget_tokens: int, span_groups: bool) -> list[list[Item]]:
    """Consecutive micro-batches."""
    packed: list[list[Item]] = []
    rest = list(items)
    while rest:
        count = take(rest, budget_tokens, span_groups)
        packed.append(rest[:count])
        rest = rest[count:]
    return packed

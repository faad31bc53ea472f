"""Batching: which trajectories share a micro-batch, and which replica trains them?

The unit of training work is the trajectory. `owners` splits trajectories over data-parallel replicas, `pack` cuts a share
into micro-batches. Both depend on token counts alone, so that the same trajectories always meet in the same micro-batches.
`feasible` is fifo mode's selector (RolloutPipe, section 3.2): which of the complete groups that wait does the trainer take now?

Invariants (tests/property/test_batching.py asserts each):
- every trajectory lands in exactly one micro-batch;
- a micro-batch exceeds the budget only if it holds a single trajectory;
- the heaviest share exceeds the mean by at most the longest trajectory;
- a feasible batch is whole groups, within the budget or a single group.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from rpipe.core.types import GroupId

FILL = 2  # micro-batches a pipeline stage, at least, where there are trajectories enough: a bubble of a third or less


class Item(NamedTuple):
    """One trajectory waiting to be trained."""

    group: GroupId
    sample: int
    tokens: int


def owners(items: Sequence[Item], replicas: int) -> list[list[Item]]:
    """Longest first onto the replica with the fewest tokens; each share is back in the given order."""
    shares: list[list[tuple[int, Item]]] = [[] for _ in range(replicas)]
    loads = [(0, replica) for replica in range(replicas)]  # a heap: the fewest tokens, then the lowest number
    for at, item in sorted(enumerate(items), key=lambda pair: (-pair[1].tokens, pair[0])):
        load, replica = loads[0]
        shares[replica].append((at, item))
        heapq.heapreplace(loads, (load + item.tokens, replica))
    return [[item for _, item in sorted(share)] for share in shares]


def pack(items: Sequence[Item], budget_tokens: int) -> list[list[Item]]:
    """Consecutive micro-batches, each as long as the budget allows."""
    packed: list[list[Item]] = []
    tokens = 0
    for item in items:
        if not packed or tokens + item.tokens > budget_tokens:
            packed.append([])
            tokens = 0
        packed[-1].append(item)
        tokens += item.tokens
    return packed


def feasible(items: deque[Item], budget_tokens: int) -> list[Item]:
    """Take the largest prefix of whole groups that fits; a first group that does not fit goes alone. O(what is taken)."""
    taken: list[Item] = []
    tokens = 0
    while items:
        group = list(takewhile(lambda item: item.group == items[0].group, items))
        tokens += sum(item.tokens for item in group)
        if taken and tokens > budget_tokens:
            break
        for _ in group:
            taken.append(items.popleft())
    return taken


def pipelined(items: Sequence[Item], budget_tokens: int, stages: int) -> list[list[Item]]:
    """Micro-batches for one schedule of a pipeline: as `pack` cuts them, or finer where they would be fewer than
    FILL a stage: with m of them, (stages - 1) / (m + stages - 1) of the time is bubble."""
    packed = pack(items, budget_tokens)
    if stages > 1 and len(packed) < FILL * stages:
        finer = -(-sum(item.tokens for item in items) // (FILL * stages))
        packed = pack(items, min(budget_tokens, max(finer, *(item.tokens for item in items))))
    return packed

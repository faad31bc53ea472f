"""Batching: which trajectories share a micro-batch, and which replica trains them?

The unit of training work is the trajectory. `owners` splits trajectories over data-parallel replicas, `calls` cuts a share
into micro-batches (`pack`, or finer for a pipeline: `pipelined`). All depend on token counts alone, so that the same
trajectories always meet in the same micro-batches.
`feasible` is fifo mode's selector (RolloutPipe, section 3.2): which of the complete groups that wait does the trainer take now?

Invariants (tests/property/test_batching.py asserts each):
- every trajectory lands in exactly one micro-batch;
- a micro-batch exceeds the budget only if it holds a single trajectory; where peers share it (`training.ep`), none of them
  holds more than the budget or the longest trajectory;
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


Call = list[list[Item]]  # micro-batches that a replica runs in one go


def owners(items: Sequence[Item], replicas: int) -> list[list[Item]]:
    """Longest first onto the replica with the fewest tokens; each share is back in the given order."""
    shares: list[list[tuple[int, Item]]] = [[] for _ in range(replicas)]
    loads = [(0, replica) for replica in range(replicas)]  # a heap: the fewest tokens, then the lowest number
    for at, item in sorted(enumerate(items), key=lambda pair: (-pair[1].tokens, pair[0])):
        load, replica = loads[0]
        shares[replica].append((at, item))
        heapq.heapreplace(loads, (load + item.tokens, replica))
    return [[item for _, item in sorted(share)] for share in shares]


def heaviest(items: Sequence[Item], peers: int) -> int:
    """Tokens of the longest part where `owners` shares a micro-batch out over its peers."""
    return max(sum(item.tokens for item in part) for part in owners(items, peers))


def pack(items: Sequence[Item], budget_tokens: int, peers: int = 1) -> list[list[Item]]:
    """Consecutive micro-batches, each as long as the budget allows. Where `peers` share a micro-batch the budget is each one's,
    and beside a trajectory that exceeds it the others may hold as much."""
    packed: list[list[Item]] = []
    tokens = longest = 0
    for item in items:
        tokens, longest = tokens + item.tokens, max(longest, item.tokens)
        limit = max(budget_tokens, longest)
        # a part exceeds the mean by (peers - 1) / peers of the longest, at most: far below the limit nobody need look
        near = tokens + (peers - 1) * longest > peers * limit
        if not packed or (near and heaviest([*packed[-1], item], peers) > limit):
            packed.append([])
            tokens = longest = item.tokens
        packed[-1].append(item)
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


def pipelined(items: Sequence[Item], budget_tokens: int, stages: int, peers: int = 1) -> list[list[Item]]:
    """Micro-batches for one schedule of a pipeline: as `pack` cuts them, or finer where they would be fewer than FILL a stage,
    down to the longest trajectory. With m of them, (stages - 1) / (m + stages - 1) of the time is bubble."""
    packed = pack(items, budget_tokens, peers)
    if packed and stages > 1 and len(packed) < FILL * stages:
        finer = -(-sum(item.tokens for item in items) // (FILL * stages * peers))
        packed = pack(items, min(budget_tokens, max(finer, *(item.tokens for item in items))), peers)
    return packed


def at_once(stages: int) -> int:
    """Micro-batches of a call, at least, where there are so many: one, or what fills a pipeline."""
    return FILL * stages if stages > 1 else 1


def calls(items: Sequence[Item], budget_tokens: int, stages: int, peers: int = 1) -> list[Call]:
    """What a replica runs of its share, in order; in one call of a pipeline less than twice what fills it."""
    cut = pipelined(items, budget_tokens, stages, peers)
    count = max(1, len(cut) // at_once(stages)) if cut else 0
    return [cut[i * len(cut) // count : (i + 1) * len(cut) // count] for i in range(count)]

"""Which lane does each of many overlapping spans take, so that no two in a lane overlap?"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """A lane for each (start, end) of `spans`, which are sorted by start: the lowest that is free then."""
    running: list[tuple[float, int]] = []  # heap of (end, lane)
    free: list[int] = []
    taken: list[int] = []
    for start, end in spans:
        while running and running[0][0] <= start:
            heapq.heappush(free, heapq.heappop(running)[1])
        lane = heapq.heappop(free) if free else len(running)
        heapq.heappush(running, (end, lane))
        taken.append(lane)
    return taken

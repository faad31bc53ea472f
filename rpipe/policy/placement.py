"""Placement: which engine generates this trajectory?

`least_loaded` takes the engine with the fewest trajectories in flight, the lowest number on a tie. `group_affine` keeps a
group's trajectories on one engine, so that they share its prompt in the prefix cache; the group goes where the fewest are.

Cost: O(log engines) a decision, amortized.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Loads:
    """How many trajectories are in flight on each engine: `loads[e]`, `loads[e] += 1`, `least()`."""

    def __init__(self, counts: Iterable[int]) -> None:
        self._counts = list(counts)
        self._heap: list[tuple[int, int]] = []  # (count, engine); one that is no engine's count any more is skipped
        self._rebuild()

    def __getitem__(self, engine: int) -> int:
        return self._counts[engine]

    def __setitem__(self, engine: int, count: int) -> None:
        self._counts[engine] = count
        heapq.heappush(self._heap, (count, engine))
        if len(self._heap) > 8 * len(self._counts):
            self._rebuild()

    def __len__(self) -> int:
        return len(self._counts)

    def least(self) -> int:
        """The engine with the fewest, the lowest number on a tie."""
        while self._heap[0][0] != self._counts[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def _rebuild(self) -> None:
        self._heap = [(count, engine) for engine, count in enumerate(self._counts)]
        heapq.heapify(self._heap)


class Placement(Protocol):
    def place(self, in_flight: Loads, sibling: int | None) -> int:
        """An engine's number. `in_flight[e]` counts trajectories on engine e; `sibling` is where the group's last one went."""
        ...


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    def place(self, in_flight: Loads, sibling: int | None) -> int:
        return in_flight.least()


@dataclass(frozen=True, slots=True)
class GroupAffine:
    def place(self, in_flight: Loads, sibling: int | None) -> int:
        return sibling if sibling is not None else in_flight.least()

"""Which trajectory is due next? Soonest first, the lower id on a tie. Cost: O(log n) an operation, amortized."""

from __future__ import annotations

import heapq

from rpipe.core.types import TrajectoryId


class Deadlines:
    """`set`, `drop` (unknown ones too), `next_t`, `overdue`."""

    def __init__(self) -> None:
        self._due_t: dict[TrajectoryId, float] = {}
        self._heap: list[tuple[float, TrajectoryId]] = []  # an entry that `_due_t` does not confirm is skipped

    def set(self, trajectory: TrajectoryId, due_t: float) -> None:
        self._due_t[trajectory] = due_t
        heapq.heappush(self._heap, (due_t, trajectory))

    def drop(self, trajectory: TrajectoryId) -> float | None:
        """When it was due."""
        return self._due_t.pop(trajectory, None)

    @property
    def next_t(self) -> float | None:
        while self._heap and self._due_t.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def overdue(self, t: float) -> list[TrajectoryId]:
        """Those due by `t`; they are due no more."""
        found: list[TrajectoryId] = []
        while (due_t := self.next_t) is not None and due_t <= t:
            trajectory = heapq.heappop(self._heap)[1]
            del self._due_t[trajectory]
            found.append(trajectory)
        return found

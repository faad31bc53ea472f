"""Placement: which engine generates this trajectory?

`least_loaded` takes the engine with the fewest trajectories in flight, the lowest number on a tie. `group_affine` keeps a
group's trajectories on one engine, so that they share its prompt in the prefix cache; the group goes where the fewest are.

Cost: O(engines) a decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Placement(Protocol):
    def place(self, in_flight: Sequence[int], sibling: int | None) -> int:
        """An engine's number. `in_flight[e]` counts trajectories on engine e; `sibling` is where the group's last one went."""
        ...


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    def place(self, in_flight: Sequence[int], sibling: int | None) -> int:
        return min(range(len(in_flight)), key=lambda engine: (in_flight[engine], engine))


@dataclass(frozen=True, slots=True)
class GroupAffine:
    def place(self, in_flight: Sequence[int], sibling: int | None) -> int:
        return sibling if sibling is not None else LeastLoaded().place(in_flight, None)

"""How are lengths, turns, waits and staleness distributed over a run?

Waits go into logarithmic bins, ten a decade, so that memory does not grow with the run. Staleness of a trained trajectory is
counted in optimizer steps: how many the weights had moved, within its iteration, when its gradient was taken. (In versions it
is 0 on every run that is on-policy; a log that says otherwise is counted as it says.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rpipe.analysis.spans import Detail

BINS_PER_DECADE = 10
SMALLEST_S = 1e-4
LENGTH_BINS = 40
WAITS = {
    "queue_s": "a trajectory's wait in its engine's queue, prefill included",
    "generate_s": "a trajectory's generation",
    "tool_s": "an environment's answer, queue included",
    "reward_s": "a trajectory's reward, queue included",
    "group_s": "a complete group's wait for its first micro-batch",
}


@dataclass(slots=True)
class Spread:
    waits: dict[str, Counter[int]] = field(default_factory=lambda: {name: Counter() for name in WAITS})
    staleness: Counter[int] = field(default_factory=Counter)  # optimizer steps
    versions: Counter[int] = field(default_factory=Counter)  # iteration less version

    def add(self, at: Detail) -> None:
        index = at.step_index()
        for group in at.groups.values():
            if group.arrived_t is not None and group.dispatched_t is not None:
                self._wait("group_s", group.dispatched_t - group.arrived_t)
            if group.step is not None and group.step in index and at.steps[group.step].ended_t is not None:
                self.staleness[index[group.step]] += max(len(group.trajectories), len(group.rewards))
                if at.version is not None:
                    self.versions[at.iteration - at.version] += max(len(group.trajectories), len(group.rewards))
            for trajectory in group.trajectories.values():
                if trajectory.generated_t is not None:
                    self._wait("queue_s", trajectory.queued_s)
                    self._wait("generate_s", trajectory.generating_s)
                    for turn in trajectory.turns:
                        if turn.tool is not None and turn.tool.ended_t is not None:
                            self._wait("tool_s", turn.tool.ended_t - turn.tool.asked_t)
                    if trajectory.scored_t is not None:
                        self._wait("reward_s", trajectory.scored_t - trajectory.generated_t)

    def _wait(self, name: str, seconds: float) -> None:
        self.waits[name][math.floor(math.log10(max(seconds, SMALLEST_S)) * BINS_PER_DECADE)] += 1

    def rows(self) -> dict[str, Any]:
        """[lower edge in seconds, count] a bin that holds something; staleness as [steps, trajectories]."""
        bins = {
            name: [[float(f"{10 ** (index / BINS_PER_DECADE):.3g}"), n] for index, n in sorted(found.items())]
            for name, found in self.waits.items()
        }
        return {**bins, "staleness": sorted(self.staleness.items()), "versions": sorted(self.versions.items())}


def linear_bins(values: Sequence[int]) -> dict[str, Any]:
    """At most LENGTH_BINS bins of whole width from 0: {"width", "counts"}. Empty without values."""
    if not values:
        return {"width": 1, "counts": []}
    width = max(1, math.ceil((max(values) + 1) / LENGTH_BINS))
    counts = [0] * (max(values) // width + 1)
    for value in values:
        counts[value // width] += 1
    return {"width": width, "counts": counts}

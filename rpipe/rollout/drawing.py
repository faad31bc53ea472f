"""Which prompts does a rollout get, under which numbers, and which of its groups were finished before?

Training groups are numbered over the run, iteration x the most that one iteration may draw + submission order; held-out ones
are negative. The cursor counts the prompts drawn since the run's start: with it the order goes on where it was.
"""

from __future__ import annotations

from rpipe.config import Config
from rpipe.core.types import GroupId, Prompt, Version
from rpipe.rollout.held import HeldGroup, RolloutData
from rpipe.rollout.kept import KeptGroup, KeptGroups

Groups = dict[GroupId, HeldGroup]  # in submission order


class Drawing:
    """`begin` an iteration, then `more` of it; `held_out` in between."""

    def __init__(self, config: Config, data: RolloutData, kept: KeptGroups) -> None:
        self._config, self._data, self._kept = config, data, kept
        self.cursor = 0
        self._order = 0  # of the next group of this iteration
        self._before: dict[GroupId, KeptGroup] = {}  # of this iteration, by an interrupted attempt

    def begin(self, iteration: int, version: Version, fingerprint: str) -> Groups:
        """R groups, and those drawn ahead; `fingerprint` is that of the weights they will be sampled under."""
        self._order = 0
        self._before = self._kept.begin(iteration, version, fingerprint)
        return self.more(iteration, self._config.rollout.groups_per_iteration + self._config.over_sampling_groups)

    def more(self, iteration: int, count: int) -> Groups:
        chosen, self.cursor = self._data.order.take(self.cursor, count)
        first = iteration * self._config.most_groups + self._order
        self._order += count
        return {first + i: self._group(first + i, self._data.train[prompt]) for i, prompt in enumerate(chosen)}

    def _group(self, group: GroupId, prompt: Prompt) -> HeldGroup:
        samples, kept = self._config.rollout.trajectories_per_group, self._before.get(group)
        if kept is not None and kept.belongs(prompt.token_ids, samples):
            return HeldGroup.of(prompt, kept, self._data.decode)
        return HeldGroup(prompt, samples)

    def held_out(self) -> Groups:
        return {-1 - order: HeldGroup(prompt, 1) for order, prompt in enumerate(self._data.held_out)}

"""Would a stop be over before the batch system's time limit?

A stop may come when an iteration's training has just begun: what is left of the iteration is finished, then a checkpoint is
written. The longest seen of each must fit into `limits.notice_s`, what the batch system tells of its limit in advance.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

SPARE = 1.25  # to ask for so much more than was measured


@dataclass(slots=True)
class Notice:
    notice_s: float | None
    iteration_s: float = 0.0
    checkpoint_s: float = 0.0
    _published_t: float | None = None
    _told_s: float = 0.0

    def published(self, t: float) -> None:
        """Weights of the next iteration are out."""
        if self._published_t is not None:
            self.iteration_s = max(self.iteration_s, t - self._published_t)
        self._published_t = t

    def saved(self, started_t: float, ended_t: float) -> str:
        """A checkpoint was written; returns what to tell a person, or an empty string. Told again only when it got worse."""
        self.checkpoint_s = max(self.checkpoint_s, ended_t - started_t)
        need_s = self.iteration_s + self.checkpoint_s
        if self.notice_s is None or need_s <= self.notice_s or need_s <= self._told_s * SPARE:
            return ""
        self._told_s = need_s
        lead = ceil(need_s * SPARE)
        return (
            f"note: a stop may take {need_s:.1f} s (iteration {self.iteration_s:.1f}, checkpoint {self.checkpoint_s:.1f}), but"
            f" the batch system gives {self.notice_s:g} s of notice; wanted: sbatch --signal=B:USR2@{lead} and"
            f" limits.notice_s={lead}"
        )

"""Over a whole run, what did the trainer wait for most?

Diagnoses of iterations are added up; of each cause the worst example is kept, so that memory does not grow with the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rpipe.analysis.causes import BUSY_WAIT, CAUSES, TOLD_POINTS, median
from rpipe.analysis.diagnosis import Diagnosis, Finding


@dataclass(slots=True)
class Totals:
    """Diagnoses of many iterations, added up; holds one finding a cause, not one an iteration."""

    iterations: int = 0
    whole_s: float = 0.0
    waited_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    worst: dict[str, Finding] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)  # cause -> iterations in which it was worth a sentence
    publish_shares: list[float] = field(default_factory=list)

    def add(self, one: Diagnosis) -> None:
        self.iterations += 1
        self.whole_s += one.whole_s
        self.waited_s += one.waited_s
        for cause, taken in one.seconds.items():
            self.seconds[cause] = self.seconds.get(cause, 0.0) + taken
        for finding in one.findings:
            self.told[finding.cause] = self.told.get(finding.cause, 0) + 1
            if finding.cause not in self.worst or finding.points > self.worst[finding.cause].points:
                self.worst[finding.cause] = finding
        if one.publish_share is not None:
            self.publish_shares.append(one.publish_share)

    def shares(self) -> dict[str, float]:
        """Cause -> share of all rollout-to-train-end seconds, largest first."""
        if not self.whole_s:
            return {}
        return {cause: s / self.whole_s for cause, s in sorted(self.seconds.items(), key=lambda part: (-part[1], part[0]))}

    def sentences(self) -> list[str]:
        """The whole run's, what cost most first; each names its worst iteration."""
        if not self.iterations or not self.whole_s:
            return []
        share = self.waited_s / self.whole_s
        plural = f"the {self.iterations} iterations" if self.iterations > 1 else "the only iteration"
        head = f"the trainer waited {share:.0%} of {plural}"
        lines = [head + (": training is the bottleneck" if share < BUSY_WAIT else "")]
        for cause, points in self.shares().items():
            finding = self.worst.get(cause)
            if points >= TOLD_POINTS and finding is not None:
                text = f"{points * 100:.0f} points of it for {CAUSES[cause]}"
                often = f"{finding.points:.0%} of iteration {finding.iteration}" if self.iterations > 1 else ""
                shown = "" if finding.text.startswith(CAUSES[cause]) else f": {finding.text}"
                lines.append(f"{text}{f'; worst, {often}' if often else ''}{shown}")
        for cause in ("slow publish", "dropped groups"):
            finding = self.worst.get(cause)
            usual = median(self.publish_shares) if cause == "slow publish" else None
            if finding is not None and (usual is None or usual >= TOLD_POINTS or finding.points >= 2 * TOLD_POINTS):
                count = f" (in {self.told[cause]} of {self.iterations} iterations)" if self.iterations > 1 else ""
                lines.append(f"iteration {finding.iteration}: {finding.text}{count}")
        return lines

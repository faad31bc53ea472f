"""Why did the trainer wait, in sentences with numbers?

`waiting` says for which group, trajectory and phase each second was waited. Here each gets a cause: what differed from the
ordinary (a trajectory far above the median, an engine far below the others' pace) takes the excess over the ordinary; the rest
is ordinary rollout. Shares are of rollout-to-train-end; publishing lies outside of it and is a share of the whole cycle.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rpipe.analysis.spans import Detail, Trajectory
from rpipe.analysis.waiting import Wait, Waiting, waiting

STRAGGLER_RATIO = 2.0  # generation time against the iteration's median
SLOW_ENGINE_RATIO = 1.5  # seconds a token against the other engines' median
QUEUE_SHARE = 0.25  # of a generation: above, the engines are full and a wider frontier would not help
TOLD_POINTS = 0.05  # of an iteration: below, a cause is not worth a sentence
BUSY_WAIT = 0.15  # below this waiting ratio the trainer is the bottleneck
MIN_TURNS = 3  # of an engine, before its pace means something

CAUSES: dict[str, str] = {
    "straggler": "a straggler trajectory",
    "slow engine": "a slow engine",
    "slow reward": "rewards",
    "slow filter": "the filter function",
    "narrow frontier": "a frontier too narrow",
    "full engines": "engines with a queue",
    "environment": "tools and environments",
    "lost engine": "a lost engine",
    "serial": "the rollout as a whole (serial mode)",
    "first groups": "the first groups to be complete",
    "rollout": "a rollout slower than training",
    "channel": "groups on their way",
    "dispatch": "order and dispatch",
    "uneven replicas": "replicas waiting for one another",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """`points`: share of the iteration that this cost, 0 to 1. `text` has no full stop and no capital."""

    cause: str
    points: float
    text: str
    iteration: int
    group: int | None = None
    trajectory: int | None = None


@dataclass(slots=True)
class Diagnosis:
    """One iteration's. `seconds` by cause add up to the wait."""

    iteration: int
    whole_s: float
    waited_s: float
    seconds: dict[str, float]
    findings: list[Finding]  # what cost most first
    publish_share: float | None = None  # of the cycle
    sentence: str = ""


@dataclass(slots=True)
class Usual:
    """What is ordinary in one iteration."""

    generating_s: float
    tokens: float
    pace_s: dict[int, float]  # engine -> seconds a token, median
    slow: dict[int, float] = field(default_factory=dict)  # engine -> how many times the others' pace

    @classmethod
    def of(cls, at: Detail) -> Usual:
        trajectories = [t for t in at.trajectories() if t.generated_t is not None]
        paces: dict[int, list[float]] = defaultdict(list)
        for trajectory in trajectories:
            for turn in trajectory.turns:
                if turn.first_token_t is not None and turn.ended_t is not None and turn.output_tokens > 1:
                    paces[turn.engine].append((turn.ended_t - turn.first_token_t) / (turn.output_tokens - 1))
        usual = cls(
            generating_s=_median([t.generating_s for t in trajectories]),
            tokens=_median([t.tokens for t in trajectories]),
            pace_s={engine: _median(found) for engine, found in sorted(paces.items()) if len(found) >= MIN_TURNS},
        )
        for engine, pace in usual.pace_s.items():
            others = _median([other for name, other in usual.pace_s.items() if name != engine])
            if others > 0 and pace / others >= SLOW_ENGINE_RATIO:
                usual.slow[engine] = pace / others
        return usual


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def diagnose(at: Detail) -> Diagnosis | None:
    """None where nothing was trained."""
    found = waiting(at)
    if found is None:
        return None
    usual = Usual.of(at)
    shares: dict[tuple[str, int | None, int | None], float] = defaultdict(float)
    for wait in found.waits:
        for cause, group, sample, seconds in _blame(at, usual, found, wait):
            shares[cause, group, sample] += seconds
    by_cause: dict[str, float] = defaultdict(float)
    for (cause, _, _), taken in shares.items():
        by_cause[cause] += taken
    told = Diagnosis(at.iteration, found.whole_s, found.seconds, dict(by_cause), [])
    for cause, taken in by_cause.items():
        points = taken / found.whole_s
        if points < TOLD_POINTS:
            continue
        worst = max((key for key in shares if key[0] == cause), key=lambda key: (shares[key], key[1] or 0, key[2] or 0))
        text = _text(cause, at, usual, worst[1], worst[2], shares[worst] / found.whole_s)
        told.findings.append(Finding(cause, points, text, at.iteration, worst[1], worst[2]))
    told.findings += _outside(at)
    told.findings.sort(key=lambda finding: (-finding.points, finding.cause))
    told.publish_share = _publish_share(at)
    told.sentence = _sentence(told)
    return told


Blame = tuple[str, int | None, int | None, float]


def _blame(at: Detail, usual: Usual, found: Waiting, wait: Wait) -> list[Blame]:
    """Which causes one wait's seconds belong to."""
    simple = {
        "reward": "slow reward",
        "filter": "slow filter",
        "channel": "channel",
        "dispatch": "dispatch",
        "replicas": "uneven replicas",
        "environment": "environment",
        "lost": "lost engine",
    }
    if wait.phase in simple:
        return [(simple[wait.phase], wait.group, wait.trajectory, wait.seconds)]
    if wait.group is None or wait.trajectory is None:
        return [("rollout", None, None, wait.seconds)]
    group = at.groups[wait.group]
    trajectory = group.trajectories[wait.trajectory]
    parts: list[Blame] = []
    left = wait.seconds
    if wait.phase == "generating":
        for cause, excess in _excesses(usual, trajectory):
            taken = min(left, excess)
            if taken > 0:
                parts.append((cause, wait.group, wait.trajectory, taken))
                left -= taken
    full = trajectory.queued_s > QUEUE_SHARE * max(usual.generating_s, trajectory.generating_s)
    admitted = group.admitted_t
    deferred_s = max(0.0, admitted - group.requested_t) if admitted is not None else 0.0
    if wait.phase == "queued" and full:
        parts.append(("full engines", wait.group, wait.trajectory, left))
        left = 0.0
    elif not full and not found.serial:  # admitted at once, it would have come that much sooner
        taken = min(left, deferred_s)
        if taken > 0:
            parts.append(("narrow frontier", wait.group, wait.trajectory, taken))
            left -= taken
    if left > 0:
        first = min((b.dispatched_t for b in at.micro_batches), default=0.0)
        begun = group.dispatched_t is not None and group.dispatched_t <= first
        ordinary = "serial" if found.serial else "first groups" if begun else "rollout"
        parts.append((ordinary, wait.group, wait.trajectory, left))
    return parts


def _excesses(usual: Usual, trajectory: Trajectory) -> list[tuple[str, float]]:
    """Seconds of generation beyond the ordinary: first those of a slow engine, then those of a long answer."""
    excesses: list[tuple[str, float]] = []
    took = trajectory.generating_s
    slow = max((usual.slow.get(turn.engine, 1.0) for turn in trajectory.turns), default=1.0)
    if slow > 1:
        excesses.append(("slow engine", took * (1 - 1 / slow)))
        took /= slow
    if usual.generating_s > 0 and took >= STRAGGLER_RATIO * usual.generating_s:
        excesses.append(("straggler", took - usual.generating_s))
    return excesses


# ---- sentences ------------------------------------------------------------------------------------------------------


def _text(cause: str, at: Detail, usual: Usual, number: int | None, sample: int | None, points: float) -> str:
    """What was seen, for the worst example of a cause; `points` is that example's share."""
    group = at.groups.get(number) if number is not None else None
    trajectory = group.trajectories.get(sample) if group is not None and sample is not None else None
    if group is None or trajectory is None:
        return CAUSES[cause]
    name = f"group {group.group}"
    if cause == "straggler":
        ratio = trajectory.generating_s / usual.generating_s
        return (
            f"{name}, whose trajectory {sample} ran {ratio:.1f}x the median"
            f" ({trajectory.tokens:,} tokens, median {usual.tokens:,.0f})"
        )
    if cause == "slow engine":
        engine = max((t.engine for t in trajectory.turns), key=lambda e: usual.slow.get(e, 1.0))
        others = usual.pace_s[engine] / usual.slow[engine]
        return (
            f"engine {engine} needs {usual.pace_s[engine] * 1000:.3g} ms a token, the others {others * 1000:.3g} ms"
            f" ({usual.slow[engine]:.1f}x): {points * 100:.0f} points for {name} alone"
        )
    if cause == "slow reward" and trajectory.scored_t is not None and trajectory.generated_t is not None:
        queue_s = max(0.0, (trajectory.score_started_t or trajectory.generated_t) - trajectory.generated_t)
        text = f"the reward of trajectory {trajectory.name} took {trajectory.scored_t - trajectory.generated_t:.3g} s"
        queued = queue_s >= TOLD_POINTS * _whole_s(at)
        return text + (f", {queue_s:.3g} s of it waiting for a free reward worker" if queued else "")
    if cause == "narrow frontier":
        width, deferred = frontier(at)
        admitted_s = (group.admitted_t or group.requested_t) - group.requested_t
        return (
            f"at most {width} groups were in service while up to {deferred} were deferred, and the engines had no queue:"
            f" {name}, which the trainer awaited, was admitted after {admitted_s:.3g} s (a wider frontier starts it sooner)"
        )
    if cause == "full engines":
        return (
            f"trajectory {trajectory.name} waited {trajectory.queued_s:.3g} s in engine {trajectory.turns[-1].engine}'s queue:"
            " the engines are full"
        )
    if cause == "dispatch":
        return f"{name} was there, but not handed out: {points * 100:.0f} points"
    if cause == "channel" and group.sent_t is not None and group.arrived_t is not None:
        return f"{name} took {group.arrived_t - group.sent_t:.3g} s from complete to the trainer"
    return f"{CAUSES[cause]}; the longest for {name}"


def _whole_s(at: Detail) -> float:
    ended, begun = at.train_ended_t, at.requested_t
    return ended - begun if ended is not None and begun is not None else 0.0


def frontier(at: Detail) -> tuple[int, int]:
    """The most groups in service at once, and the most deferred then."""
    moments: list[tuple[float, int, int]] = []
    for group in at.groups.values():
        if group.admitted_t is not None:
            moments.append((group.admitted_t, 1, 1))
            left = group.served_t if group.served_t is not None else group.generated_t
            if left is not None:
                moments.append((left, 0, -1))
    served = most = 0
    deferred = most_deferred = len(at.groups)
    width = 0
    for _, entered, change in sorted(moments):
        served += change
        deferred -= entered
        most = max(most, served)
        if served == most and deferred and (most > width or deferred > most_deferred):
            width, most_deferred = most, deferred
    return most, most_deferred if width else 0


def _publish_share(at: Detail) -> float | None:
    if at.publish is None or at.requested_t is None:
        return None
    cycle_s = max(at.publish.ended_t, at.next_t or 0.0) - at.requested_t
    return (at.publish.ended_t - at.publish.started_t) / cycle_s if cycle_s > 0 else None


def _outside(at: Detail) -> list[Finding]:
    """What cost time or work, but is no waiting for a group."""
    found: list[Finding] = []
    share = _publish_share(at)
    if at.publish is not None and share is not None and share >= TOLD_POINTS:
        text = f"publishing took {at.publish.ended_t - at.publish.started_t:.3g} s, {share:.0%} of the cycle"
        spans = {engine: end - start for engine, (start, end) in at.publish.engines.items()}
        if len(spans) > 1:
            slowest = max(spans, key=lambda engine: spans[engine])
            others = _median([s for engine, s in spans.items() if engine != slowest])
            if spans[slowest] > SLOW_ENGINE_RATIO * others:
                text += f"; engine {slowest} took {spans[slowest]:.3g} s of it, the others {others:.3g} s"
        found.append(Finding("slow publish", share, text, at.iteration))
    tokens = sum(t.tokens for t in at.trajectories())
    dropped = [g for g in at.groups.values() if g.dropped]
    lost = sum(t.tokens for g in dropped for t in g.trajectories.values())
    if dropped and tokens and lost / tokens >= TOLD_POINTS:
        reasons = ", ".join(sorted({g.dropped for g in dropped}))
        counts = f"{len(dropped)} of {len(at.groups)} groups were dropped ({reasons})"
        text = f"{counts}: {lost / tokens:.0%} of the tokens trained nothing"
        found.append(Finding("dropped groups", lost / tokens, text, at.iteration))
    return found


def _sentence(told: Diagnosis) -> str:
    share = told.waited_s / told.whole_s
    text = f"the trainer waited {share:.0%} of iteration {told.iteration}"
    waits = [finding for finding in told.findings if finding.cause in told.seconds]
    if share < BUSY_WAIT:
        text += ": training is the bottleneck"
    elif waits:
        top = waits[0]
        said = top.text.startswith(CAUSES[top.cause]) or top.cause == "straggler"
        text += f"; {top.points * 100:.0f} points of it for {top.text if said else f'{CAUSES[top.cause]}: {top.text}'}"
    return text


# ---- the run --------------------------------------------------------------------------------------------------------


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
            usual = _median(self.publish_shares) if cause == "slow publish" else None
            if finding is not None and (usual is None or usual >= TOLD_POINTS or finding.points >= 2 * TOLD_POINTS):
                count = f" (in {self.told[cause]} of {self.iterations} iterations)" if self.iterations > 1 else ""
                lines.append(f"iteration {finding.iteration}: {finding.text}{count}")
        return lines

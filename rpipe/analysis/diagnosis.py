"""Why did the trainer wait, in sentences with numbers?

`waiting` says for which group, trajectory and phase each second was waited. Here each gets a cause: what differed from the
ordinary (a trajectory far above the median, an engine far below the others' pace) takes the excess over the ordinary; the rest
is ordinary rollout. Shares are of rollout-to-train-end; publishing lies outside of it and is a share of the whole cycle.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rpipe.analysis.causes import (
    BUSY_WAIT,
    CAUSES,
    LONGER_RATIO,
    QUEUE_SHARE,
    SLOW_DECODING_RATIO,
    SLOW_ENGINE_RATIO,
    STRAGGLER_RATIO,
    TOLD_POINTS,
    Usual,
    describe,
    median,
)
from rpipe.analysis.deferral import deferred_s
from rpipe.analysis.spans import Detail, Trajectory
from rpipe.analysis.waiting import Wait, Waiting, waiting

# Whose seconds of a wait count first. A slow engine is the cause even of what it defers, by holding the frontier. But a group
# that was deferred although an engine had room would have come sooner at any length: that goes before its length.
ORDER = ("full engines", "slow engine", "slow decoding", "narrow frontier", "straggler")


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


def diagnose(at: Detail) -> Diagnosis | None:
    """None where nothing was trained."""
    found = waiting(at)
    if found is None:
        return None
    usual = Usual.of(at)
    deferred = deferred_s(at, usual)
    shares: dict[tuple[str, int | None, int | None], float] = defaultdict(float)
    for wait in found.waits:
        for cause, group, sample, seconds in _blame(at, usual, deferred, found, wait):
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
        text = describe(cause, at, usual, worst[1], worst[2], shares[worst] / found.whole_s)
        told.findings.append(Finding(cause, points, text, at.iteration, worst[1], worst[2]))
    told.findings += _outside(at)
    told.findings.sort(key=lambda finding: (-finding.points, finding.cause))
    told.publish_share = _publish_share(at)
    told.sentence = _sentence(told)
    return told


Blame = tuple[str, int | None, int | None, float]


def _blame(at: Detail, usual: Usual, deferred: dict[int, float], found: Waiting, wait: Wait) -> list[Blame]:
    """Which causes one wait's seconds belong to. `deferred`: what of each group's deferral no wait has been put on yet."""
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
    most = _excesses(usual, trajectory) if wait.phase == "generating" else {}
    if wait.phase == "queued" and trajectory.queued_s > QUEUE_SHARE * max(usual.generating_s, trajectory.generating_s):
        most["full engines"] = wait.seconds
    if not found.serial:  # admitted at once, it would have come that much sooner
        most["narrow frontier"] = deferred[wait.group]
    parts: list[Blame] = []
    left = wait.seconds
    for cause in ORDER:
        taken = min(left, most.get(cause, 0.0))
        if taken > 0:
            parts.append((cause, wait.group, wait.trajectory, taken))
            left -= taken
            if cause == "narrow frontier":
                deferred[wait.group] -= taken
    if left > 0:
        first = min((b.dispatched_t for b in at.micro_batches), default=0.0)
        begun = group.dispatched_t is not None and group.dispatched_t <= first
        ordinary = "serial" if found.serial else "first groups" if begun else "rollout"
        parts.append((ordinary, wait.group, wait.trajectory, left))
    return parts


def _excesses(usual: Usual, trajectory: Trajectory) -> dict[str, float]:
    """Seconds of generation beyond the ordinary: first those of a slow engine, then of slow decoding, then of a long answer."""
    excesses: dict[str, float] = {}
    took = trajectory.generating_s
    slow = max((usual.slow.get(turn.engine, 1.0) for turn in trajectory.turns), default=1.0)
    if slow > 1:
        excesses["slow engine"] = took * (1 - 1 / slow)
        took /= slow
    pace = trajectory.pace_s
    ratio = pace / slow / usual.token_s if pace is not None and usual.token_s > 0 else 1.0
    if ratio >= SLOW_DECODING_RATIO:
        excesses["slow decoding"] = took * (1 - 1 / ratio)
        took /= ratio
    longer = trajectory.tokens >= LONGER_RATIO * usual.tokens
    if longer and usual.generating_s > 0 and took >= STRAGGLER_RATIO * usual.generating_s:
        excesses["straggler"] = took - usual.generating_s
    return excesses


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
            others = median([s for engine, s in spans.items() if engine != slowest])
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

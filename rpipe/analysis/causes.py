"""Which causes of waiting are there, what is ordinary, and how is a cause said in words?"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rpipe.analysis.spans import Detail

STRAGGLER_RATIO = 2.0  # generation time against the iteration's median
LONGER_RATIO = 1.5  # a straggler's tokens against the median, too
SLOW_ENGINE_RATIO = 1.5  # seconds a token against the other engines' median
SLOW_DECODING_RATIO = 1.5  # a trajectory's seconds a token against the iteration's median
QUEUE_SHARE = 0.25  # of a generation: above, the engines are full and a wider frontier would not help
TOLD_POINTS = 0.05  # of an iteration: below, a cause is not worth a sentence
BUSY_WAIT = 0.15  # below this waiting ratio the trainer is the bottleneck
MIN_TURNS = 3  # of an engine, before its pace means something

CAUSES: dict[str, str] = {
    "straggler": "a straggler trajectory",
    "slow engine": "a slow engine",
    "slow decoding": "slow decoding",
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


@dataclass(slots=True)
class Usual:
    """What is ordinary in one iteration."""

    generating_s: float
    tokens: float
    token_s: float  # seconds a token, median over trajectories on engines that are not slow
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
            generating_s=median([t.generating_s for t in trajectories]),
            tokens=median([t.tokens for t in trajectories]),
            token_s=0.0,
            pace_s={engine: median(found) for engine, found in sorted(paces.items()) if len(found) >= MIN_TURNS},
        )
        for engine, pace in usual.pace_s.items():
            others = median([other for name, other in usual.pace_s.items() if name != engine])
            if others > 0 and pace / others >= SLOW_ENGINE_RATIO:
                usual.slow[engine] = pace / others
        ordinary = [t for t in trajectories if not any(turn.engine in usual.slow for turn in t.turns)]
        usual.token_s = median([t.pace_s for t in ordinary if t.pace_s is not None])
        return usual


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def describe(cause: str, at: Detail, usual: Usual, number: int | None, sample: int | None, points: float) -> str:
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
    if cause == "slow decoding" and trajectory.pace_s is not None:
        return (
            f"trajectory {trajectory.name} needed {trajectory.pace_s * 1000:.3g} ms a token, the median is"
            f" {usual.token_s * 1000:.3g} ms ({trajectory.pace_s / usual.token_s:.1f}x): its engine was crowded, or paused it"
        )
    if cause == "slow reward" and trajectory.scored_t is not None and trajectory.generated_t is not None:
        queue_s = max(0.0, (trajectory.score_started_t or trajectory.generated_t) - trajectory.generated_t)
        text = f"the reward of trajectory {trajectory.name} took {trajectory.scored_t - trajectory.generated_t:.3g} s"
        queued = queue_s >= TOLD_POINTS * _whole_s(at)
        return text + (f", {queue_s:.3g} s of it waiting for a free reward worker" if queued else "")
    if cause == "environment":
        calls = [turn.tool for turn in trajectory.turns if turn.tool is not None and turn.tool.ended_t is not None]
        longest_s = max(((call.ended_t or 0.0) - call.asked_t for call in calls), default=0.0)
        return (
            f"trajectory {trajectory.name} was in tools for {trajectory.tool_s:.3g} s of {len(trajectory.turns)} turns"
            f" (generating {trajectory.generating_s:.3g} s; the longest call took {longest_s:.3g} s)"
        )
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

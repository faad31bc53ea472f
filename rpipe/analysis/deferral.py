"""How long was a group deferred while the engines had room for it?

A group is deferred from its request until its first turn is sent. Two things say that there was no room:

    a queue     every engine has turns that wait for their first token longer than a prefill takes: a wider frontier would only
                have moved the wait into their queues
    a place     the group came in at the very moment when a trajectory ended and no group left the frontier: it had waited for
                that place in an engine (a soft frontier keeps all places taken, so that there is no queue either)

What is left is admission's doing. A command's time is its event's (docs/event-log.md), so moments can be compared.
"""

from __future__ import annotations

from collections import defaultdict

from rpipe.analysis.causes import QUEUE_SHARE, Usual
from rpipe.analysis.spans import Detail
from rpipe.analysis.waiting import Interval


def deferred_s(at: Detail, usual: Usual) -> dict[int, float]:
    """Seconds by group; 0 where it was admitted at once, or never."""
    full = _full(at, QUEUE_SHARE * usual.generating_s)
    served = {group.served_t for group in at.groups.values()}
    places = {turn.ended_t for t in at.trajectories() for turn in t.turns} - served
    found: dict[int, float] = {}
    for group in at.groups.values():
        since, until = group.requested_t, group.admitted_t
        if until is None or until in places:
            found[group.group] = 0.0
        else:
            queued_s = sum(max(0.0, min(end, until) - max(start, since)) for start, end in full)
            found[group.group] = max(0.0, until - since - queued_s)
    return found


def _full(at: Detail, prefill_s: float) -> list[Interval]:
    """When every engine that was used had a queue, in order."""
    engines = {turn.engine for t in at.trajectories() for turn in t.turns}
    changes: list[tuple[float, int, int]] = []
    for trajectory in at.trajectories():
        for turn in trajectory.turns:
            if turn.first_token_t is not None and turn.first_token_t - turn.sent_t > prefill_s:
                changes += [(turn.sent_t, turn.engine, 1), (turn.first_token_t, turn.engine, -1)]
    waiting: dict[int, int] = defaultdict(int)  # turns in an engine's queue
    full: list[Interval] = []
    queueing, since = 0, 0.0
    for t, engine, change in sorted(changes):
        before = queueing
        queueing += (waiting[engine] + change > 0) - (waiting[engine] > 0)
        waiting[engine] += change
        if before < queueing == len(engines):
            since = t
        elif queueing < before == len(engines) and t > since:
            full.append((since, t))
    return full

"""How does a run look in Perfetto or chrome://tracing?

A Chrome trace: one process an engine with its slots as threads, tools, rewards, the trainer's replicas and steps, publishing,
and what lay between attempts. An arrow goes from a group's last trajectory to its first micro-batch. All attempts stand on one
calendar. Written iteration by iteration: memory does not grow with the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rpipe.analysis.collect import Collector, stream
from rpipe.analysis.lanes import lanes
from rpipe.analysis.run import attempts, read
from rpipe.analysis.spans import Detail, Track, tool_calls
from rpipe.analysis.summary import RunSummary, summarize

ITERATIONS, TOOLS, REWARDS, TRAINER, BETWEEN, EVENTS, ENGINES = 1, 2, 3, 4, 5, 6, 100  # process ids; engine e is ENGINES + e
NAMES = {
    ITERATIONS: "iterations",
    TOOLS: "tools",
    REWARDS: "rewards",
    TRAINER: "trainer",
    BETWEEN: "publish and save",
    EVENTS: "events",
}
STEPS_THREAD = 1000
Event = dict[str, Any]


def write(run: Path, path: Path) -> int:
    """The trace file, whole or not there; returns how many events it holds. Raises RunError, OSError."""
    found = summarize(run)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    with draft.open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for event in _events(run, found):
            file.write((",\n" if count else "") + json.dumps(event, separators=(",", ":")))
            count += 1
        file.write("\n]}\n")
    draft.replace(path)
    return count


def _events(run: Path, found: RunSummary) -> Iterator[Event]:
    processes: set[int] = set()
    for index, directory in enumerate(attempts(run)):
        span = found.spans[index]
        collector = Collector()
        for detail in stream(read(directory), collector):
            for event in [*_rollout(detail, index), *_training(detail, index)]:
                processes.add(event["pid"])
                yield _placed(event, span.start_s)
        for event in _between(collector.track, span.number, span.gap_s):
            processes.add(event["pid"])
            yield _placed(event, span.start_s)
    for pid in sorted(processes):
        name = NAMES.get(pid, f"engine {pid - ENGINES}")
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid if pid < TOOLS else pid % 97}}
    yield {"ph": "M", "name": "thread_name", "pid": TRAINER, "tid": STEPS_THREAD, "args": {"name": "optimizer steps"}}


def _placed(event: Event, start_s: float) -> Event:
    """Seconds of the attempt become microseconds of the calendar."""
    event["ts"] = round((event["ts"] + start_s) * 1e6, 1)
    if "dur" in event:
        event["dur"] = round(max(0.0, event["dur"]) * 1e6, 1)
    return event


def _bar(name: str, category: str, pid: int, tid: int, start: float | None, end: float | None, **args: Any) -> list[Event]:
    if start is None or end is None:
        return []
    return [{"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}]


def _rollout(at: Detail, attempt: int) -> list[Event]:
    name = f"iteration {at.iteration}" if at.purpose == "train" else f"evaluation {at.iteration}"
    events = _bar(
        name, at.purpose, ITERATIONS, 0, at.requested_t, at.rollout_ended_t, version=at.version, groups=len(at.groups)
    )
    turns = [(turn, t) for t in at.trajectories() for turn in t.turns if turn.ended_t is not None]
    for engine in sorted({turn.engine for turn, _ in turns}):
        mine = sorted((p for p in turns if p[0].engine == engine), key=lambda p: (p[0].sent_t, p[1].group, p[1].sample))
        slots = lanes([(turn.sent_t, turn.ended_t or 0.0) for turn, _ in mine])
        for slot, (turn, t) in zip(slots, mine):
            about = {
                "group": t.group,
                "sample": t.sample,
                "tokens": turn.output_tokens,
                "finish": turn.finish,
                "reward": t.reward,
            }
            pid = ENGINES + engine
            first = turn.first_token_t if turn.first_token_t is not None else turn.ended_t
            events += _bar(f"{t.name} queued", "queue", pid, slot, turn.sent_t, first)
            events += _bar(t.name, "generate", pid, slot, first, turn.ended_t, cached_tokens=turn.cached_tokens, **about)
            group = at.groups[t.group]
            if group.last() is t and turn is t.turns[-1] and group.trained_t is not None:
                events.append(_flow("s", at, attempt, t.group, pid, slot, turn.ended_t or 0.0))
    calls = tool_calls(at)
    for lane, (asked, ended, turn, t) in zip(lanes([call[:2] for call in calls]), calls):
        assert turn.tool is not None
        about = {"answer_tokens": turn.tool.answer_tokens, "error": turn.tool.error}
        events += _bar(t.name, "tool", TOOLS, lane, asked, ended, turn=t.turns.index(turn), **about)
    scored = sorted((t for t in at.trajectories() if t.scored_t is not None), key=lambda t: (_asked(t), t.group, t.sample))
    for lane, t in zip(lanes([(_asked(t), t.scored_t or 0.0) for t in scored]), scored):
        queue_s = (t.score_started_t or _asked(t)) - _asked(t)
        events += _bar(t.name, "reward", REWARDS, lane, _asked(t), t.scored_t, reward=t.reward, queue_s=queue_s, error=t.error)
    return events


def _asked(trajectory: Any) -> float:
    for t in (trajectory.score_asked_t, trajectory.score_started_t, trajectory.scored_t):
        if t is not None:
            return float(t)
    return 0.0


def _flow(phase: str, at: Detail, attempt: int, group: int, pid: int, tid: int, t: float) -> Event:
    end = {"bp": "e"} if phase == "f" else {}
    name = f"{attempt}.{at.iteration}.{group}"
    return {"ph": phase, "name": "group", "cat": "group", "id": name, "pid": pid, "tid": tid, "ts": t, **end}


def _training(at: Detail, attempt: int) -> list[Event]:
    events: list[Event] = []
    led: set[int] = set()
    for m in at.micro_batches:
        if m.started_t is None or m.ended_t is None:
            continue
        groups = [group for group, _ in m.slices]
        name = f"step {m.step}: {', '.join(map(str, groups[:4]))}{' ...' if len(groups) > 4 else ''}"
        events += _bar(name, "micro-batch", TRAINER, m.replica, m.started_t, m.ended_t, groups=groups, tokens=m.tokens)
        for group in groups:
            if group not in led and group in at.groups and at.groups[group].last() is not None:
                led.add(group)
                events.append(_flow("f", at, attempt, group, TRAINER, m.replica, m.started_t))
    for step in at.steps.values():
        about = {"groups": list(step.groups), "loss": step.loss, "grad_norm": step.grad_norm, "skipped": step.skipped}
        events += _bar(f"step {step.step}", "step", TRAINER, STEPS_THREAD, step.started_t, step.ended_t, **about)
    return events


def _between(track: Track, number: int, gap_s: float) -> list[Event]:
    events = _bar("starting", "attempt", ITERATIONS, 1, 0.0, track.ready_t, attempt=number)
    if gap_s > 0:
        events += _bar(f"gap before attempt {number}", "attempt", ITERATIONS, 1, -gap_s, 0.0)
    if track.warm_up is not None:
        events += _bar("warming up", "attempt", ITERATIONS, 0, *track.warm_up)
    for p in track.publishes:
        events += _bar(f"publish version {p.version}", "publish", BETWEEN, 0, p.started_t, p.ended_t, nbytes=p.nbytes)
    for start, end, iteration in track.checkpoints:
        events += _bar(f"save after {iteration}", "save", BETWEEN, 1, start, end)
    for outage in track.outages:
        until = outage.restarted_t if outage.restarted_t is not None else track.ended_t
        about = {"reason": outage.reason, "turns": outage.turns, "kept_tokens": outage.kept_tokens}
        events += _bar(f"engine {outage.engine} lost", "lost", EVENTS, outage.engine, outage.lost_t, until, **about)
    for mark in track.marks:
        about = {"rank": mark.rank, "fields": mark.text}
        events.append(
            {"ph": "i", "s": "g", "name": mark.kind, "cat": "event", "pid": EVENTS, "tid": 0, "ts": mark.t, "args": about}
        )
    return events

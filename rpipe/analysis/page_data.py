"""What does the HTML page know of a run?

One JSON-ready dict: the report, the calendar of attempts, distributions, and spans of as many iterations as the page can carry
(all of a small run; of a large one the first, the last, the slowest and some between). All times are seconds on the run's
calendar, from the first attempt's start. web/*.js names the same fields.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpipe.analysis.collect import Collector, stream
from rpipe.analysis.lanes import lanes
from rpipe.analysis.run import attempts, read
from rpipe.analysis.spans import Detail, Track, Trajectory, Turn, tool_calls
from rpipe.analysis.spread import WAITS, Spread, linear_bins
from rpipe.analysis.summary import RunSummary, report_of, summarize

CARRIED_TRAJECTORIES = 20_000  # about 2 MB of page
MARKS = 500
Rows = list[list[Any]]


def of_run(run: Path, name: str) -> dict[str, Any]:
    """Reads the log twice: once for figures, once for the spans of the chosen iterations. Raises RunError."""
    spread = Spread()
    found = summarize(run, lambda detail: spread.add(detail))
    chosen = choose(found)
    lengths = [tokens for at in found.iterations for tokens in at.response_tokens]
    data: dict[str, Any] = {
        "name": name,
        "report": report_of(found, name),
        "sentences": {n: d.sentence for n, d in found.diagnoses.items()},
        "causes": {n: d.seconds for n, d in found.diagnoses.items()},
        "spread": {"length": linear_bins(lengths), **spread.rows()},
        "spread_names": WAITS,
        "attempts": [],
        "details": [],
    }
    for index, directory in enumerate(attempts(run)):
        start_s = found.spans[index].start_s
        collector = Collector()
        evaluations: Rows = []
        iterations: Rows = []
        for detail in stream(read(directory), collector):
            if detail.purpose == "eval":
                evaluations.append([_at(detail.requested_t, start_s), _at(detail.rollout_ended_t, start_s), detail.iteration])
                continue
            kept = found.home.get(detail.iteration) == index
            ends = (detail.requested_t, detail.rollout_ended_t, detail.train_ended_t)
            iterations.append([detail.iteration, *(_at(t, start_s) for t in ends), kept])
            if (index, detail.iteration) in chosen:
                data["details"].append(_detail(detail, index, start_s, kept))
        row = found.spans[index].row()
        data["attempts"].append({**_attempt(collector.track, row, start_s, evaluations), "iterations": iterations})
    return data


def of_report(told: dict[str, Any]) -> dict[str, Any]:
    """Of another system's log: there is a report, and nothing to draw lane by lane."""
    run = {"medians": {}, "history": [], "waiting": {}, **told["run"]}
    rows = [{key: value for key, value in row.items() if key != "raw"} for row in told["iterations"]]
    return {
        "name": told["run"]["name"],
        "report": {**told, "iterations": rows, "run": run},
        "sentences": {},
        "causes": {},
        "spread": {},
        "attempts": [],
        "details": [],
        "unread": told["run"]["unread"],
    }


def choose(found: RunSummary) -> set[tuple[int, int]]:
    """(attempt, iteration) pairs that fit into the page; at least one."""
    sizes = {(index, n): max(1, at.trajectories) for index, a in enumerate(found.attempts) for n, at in a.iterations.items()}
    if sum(sizes.values()) <= CARRIED_TRAJECTORIES:
        return set(sizes)
    kept = [(found.home[at.iteration], at.iteration) for at in found.iterations] or sorted(sizes)
    told = found.diagnoses
    by_length = sorted(kept, key=lambda key: -told[key[1]].whole_s if key[1] in told else 0.0)
    by_wait = sorted(kept, key=lambda key: -told[key[1]].waited_s if key[1] in told else 0.0)
    fits = max(2, CARRIED_TRAJECTORIES // max(sizes.values()))
    between = [kept[round(index * (len(kept) - 1) / (fits - 1))] for index in range(fits)]
    chosen: set[tuple[int, int]] = set()
    room = CARRIED_TRAJECTORIES
    for key in [kept[-1], by_length[0], by_wait[0], kept[0], *between]:
        if key not in chosen and (sizes[key] <= room or not chosen):
            chosen.add(key)
            room -= sizes[key]
    return chosen


def _at(t: float | None, start_s: float) -> float | None:
    return None if t is None else round(t + start_s, 4)


def _attempt(track: Track, row: dict[str, Any], start_s: float, evaluations: Rows) -> dict[str, Any]:
    warm = [_at(t, start_s) for t in track.warm_up] if track.warm_up else None
    outages: Rows = [
        [o.engine, _at(o.lost_t, start_s), _at(o.restarted_t, start_s), o.reason, o.turns, o.kept_tokens] for o in track.outages
    ]
    return {
        **row,
        "ready": _at(track.ready_t, start_s),
        "warm_up": warm,
        "evaluations": evaluations,
        "publishes": [[_at(p.started_t, start_s), _at(p.ended_t, start_s), p.version] for p in track.publishes],
        "checkpoints": [[_at(a, start_s), _at(b, start_s), n] for a, b, n in track.checkpoints],
        "outages": outages,
        "marks": [[_at(m.t, start_s), m.rank, m.kind, m.text] for m in track.marks[:MARKS]],
        "marked": track.marked,
    }


def _detail(at: Detail, attempt: int, start_s: float, kept: bool) -> dict[str, Any]:
    index = at.step_index()
    trained = [m for m in at.micro_batches if m.started_t is not None and m.ended_t is not None]
    groups: Rows = []
    for g in sorted(at.groups.values(), key=lambda g: g.order):
        times = [_at(t, start_s) for t in (g.admitted_t, g.generated_t, g.sent_t, g.arrived_t, g.dispatched_t, g.trained_t)]
        step = index.get(g.step) if g.step is not None else None
        groups.append([g.group, *times, step, g.dropped, len(g.restored_tokens)])
    return {
        "iteration": at.iteration,
        "attempt": attempt,
        "kept": kept,
        "version": at.version,
        "replicas": at.replicas,
        "start": _at(at.requested_t, start_s),
        "rollout_end": _at(at.rollout_ended_t, start_s),
        "train_end": _at(at.train_ended_t, start_s),
        "groups": groups,
        **_turns(at, start_s),
        "micro_batches": [
            [m.replica, _at(m.started_t, start_s), _at(m.ended_t, start_s), index.get(m.step)]
            + [m.tokens, [group for group, _ in m.slices]]
            for m in trained
        ],
        "steps": [
            [index[s.step], s.step, _at(s.started_t, start_s), _at(s.ended_t, start_s), s.skipped, s.loss, list(s.groups)]
            for s in at.steps.values()
            if s.started_t is not None and s.ended_t is not None
        ],
    }


def _turns(at: Detail, start_s: float) -> dict[str, Any]:
    """Turns with the slot of their engine, tools and rewards with a lane; each sorted by start."""
    found = [(turn, trajectory) for trajectory in at.trajectories() for turn in trajectory.turns]
    found = [(turn, trajectory) for turn, trajectory in found if turn.ended_t is not None]
    turns: Rows = []
    for engine in sorted({turn.engine for turn, _ in found}):
        mine = sorted(((t, tr) for t, tr in found if t.engine == engine), key=lambda p: (_start(p[0]), p[1].group, p[1].sample))
        slots = lanes([(_start(turn), turn.ended_t or 0.0) for turn, _ in mine])
        for slot, (turn, trajectory) in zip(slots, mine):
            times = [_at(t, start_s) for t in (turn.sent_t, turn.started_t, turn.first_token_t, turn.ended_t)]
            about = [trajectory.group, trajectory.sample, engine, slot]
            turns.append([*about, *times, turn.output_tokens, turn.finish, trajectory.reward])
    scored = sorted((t for t in at.trajectories() if t.scored_t is not None), key=_scoring)
    taken = lanes([(_scoring(t)[0], t.scored_t or 0.0) for t in scored])
    rewards: Rows = [
        [t.group, t.sample, lane, _at(t.score_asked_t, start_s), _at(t.score_started_t, start_s), _at(t.scored_t, start_s)]
        + [t.reward, t.error]
        for lane, t in zip(taken, scored)
    ]
    calls = tool_calls(at)
    tools: Rows = [
        [t.group, t.sample, lane, _at(asked, start_s), _at(ended, start_s), *_answer(turn)]
        for lane, (asked, ended, turn, t) in zip(lanes([call[:2] for call in calls]), calls)
    ]
    return {"turns": turns, "tools": tools, "rewards": rewards}


def _answer(turn: Turn) -> list[Any]:
    assert turn.tool is not None
    return [turn.tool.answer_tokens, turn.tool.error]


def _start(turn: Any) -> float:
    return float(turn.started_t if turn.started_t is not None else turn.sent_t)


def _scoring(trajectory: Trajectory) -> tuple[float, int, int]:
    begun = trajectory.score_asked_t if trajectory.score_asked_t is not None else trajectory.score_started_t
    return (begun if begun is not None else trajectory.scored_t or 0.0), trajectory.group, trajectory.sample

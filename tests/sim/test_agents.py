"""Simulated agents: turns as the workload says, and tools that every view of the log shows."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from rpipe.analysis import page_data, trace
from rpipe.analysis.collect import collect
from rpipe.analysis.diagnosis import diagnose
from rpipe.analysis.run import read
from rpipe.analysis.story import Target, story
from rpipe.analysis.summary import report
from rpipe.analysis.waiting import waiting
from rpipe.config import ConfigError
from rpipe.config_simulation import Agents, Workload
from rpipe.sim.job import SimulatedJob
from rpipe.sim.run import Memory, simulate
from rpipe.sim.workload import Synthetic, from_trace
from tests.sim.simulated import WORKLOAD, config

ROLLOUT = {"environment": "somebody.s:environment", "max_turns": 5, "max_new_tokens": 400}
TOOLS = {"turns": 3, "turns_sigma": 0.6, "answer_tokens": 30, "answer_sigma": 0.5, "tool_s": 0.3, "tool_sigma": 0.8}


def agents(workload=None, **sections):
    made = {"rollout": ROLLOUT, "workload": {**WORKLOAD, "agents": TOOLS, **(workload or {})}, "reward": {"workers": 64}}
    return config(**{**made, **sections})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("agents") / "run"
    simulate(agents(), path)
    return path


def told(run):
    return collect(read(run / "attempt-1"))[0]


def test_siblings_take_alike_many_turns_as_the_correlation_says():
    def between(correlation):
        workload = Workload(median_tokens=5, correlation=correlation, agents=Agents(turns=10, turns_sigma=0.5))
        source = Synthetic(workload, 0, 100_000, 100)
        counts = [[len(t) for t in source.group(g, 0, 2).turns] for g in range(400)]
        return sum(abs(a - b) for a, b in counts) / sum(a + b for a, b in counts)

    assert between(1.0) == 0.0 and 0.05 < between(0.8) < 0.7 * between(0.0)


def test_turns_stay_within_what_a_job_of_the_config_would_allow():
    source = Synthetic(Workload(median_tokens=50, agents=Agents(turns=9, answer_tokens=60)), 0, 300, 4)
    works = [source.group(g, 0, 4) for g in range(50)]
    turns = [t for work in works for t in work.turns]
    assert max(len(t) for t in turns) <= 4 and {len(t) for t in turns} > {1}
    assert max(max(work.response_tokens) for work in works) <= 300
    assert all(t[-1].answer_tokens == 0 == t[-1].tool_s and all(x.answer_tokens > 0 for x in t[:-1]) for t in turns)


def test_every_turn_of_the_workload_is_taken_with_its_history(run):
    source = SimulatedJob(agents(), Memory(), Memory()).source
    sent = Counter()
    for r in read(run / "attempt-1"):
        if r["kind"] == "SendTurn" and r["trajectory"][0] >= 0:
            group, sample = r["trajectory"]
            turns = source.group(group, 0, 4).turns[sample]
            assert r["history_tokens"] == sum(t.output_tokens + t.answer_tokens for t in turns[: r["turn"]])
            sent[group, sample] += 1
    assert sent == {(g, s): len(t) for g in range(24) for s, t in enumerate(source.group(g, 0, 4).turns)}


def test_a_next_turn_finds_its_prefix_cached_and_not_where_the_cache_is_short(run):
    def found(path):
        history, cached, whole = {}, 0, 0
        for r in read(path / "attempt-1"):
            if r["kind"] == "SendTurn":
                history[tuple(r["trajectory"])] = r["history_tokens"]
            elif r["kind"] == "TurnFinished" and history[tuple(r["trajectory"])]:
                cached, whole = cached + r["cached_tokens"], whole + 8 + history[tuple(r["trajectory"])]
        return cached / whole

    assert found(run) > 0.55  # the rest is what the environment answered
    short = run.parent / "short"
    simulate(agents(engine={"kv_tokens": 450, "max_running": 8}, admission={"policy": "fifo"}), short)
    assert found(short) < 0.8 * found(run)


def test_tools_run_at_most_as_many_at_once_as_there_are_workers(run):
    few = run.parent / "few"
    simulate(agents(reward={"workers": 2}), few)
    one, other = (report(path, "x")["run"]["tools"] for path in (run, few))
    assert one["calls"] == other["calls"] and other["seconds_p50"] > 3 * one["seconds_p50"]


def test_a_replayed_run_takes_the_same_turns_and_recorded_tool_times_unless_they_are_drawn(run):
    replay = {"lengths": "run", "path": str(run)}
    same = simulate(agents({**replay, "agents": None}), run.parent / "same")
    drawn = simulate(agents({**replay, "agents": {**TOOLS, "tool_s": 3.0}}), run.parent / "drawn")
    first, again, slow = (report(run.parent / name, "x")["run"]["tools"] for name in ("run", "same", "drawn"))
    assert same.medians["generated_tokens"] == drawn.medians["generated_tokens"]
    assert first["calls"] == again["calls"] and first["turns_mean"] == slow["turns_mean"]
    # a recorded time holds what the call waited for the log's two ends: reward_s of hardware, once more
    assert again["seconds_p50"] == pytest.approx(first["seconds_p50"], rel=0.05, abs=0.003)
    assert slow["seconds"] > 5 * first["seconds"]


def test_a_trace_may_have_turns_and_a_bad_one_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"group": 0, "sample": 0, "output_tokens": [5, 6], "answer_tokens": [7], "tool_s": [1.5]},
        {"group": 0, "sample": 1, "output_tokens": 9},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = from_trace(Workload(lengths="trace", path=str(path)), 0).group(0, 0, 2)
    assert [[(t.output_tokens, t.answer_tokens, t.tool_s) for t in turns] for turns in work.turns] == [
        [(5, 7, 1.5), (6, 0, 0.0)],
        [(9, 0, 0.0)],
    ]
    assert work.response_tokens == [18, 9] and work.output_tokens == [11, 9]
    path.write_text(json.dumps({"group": 0, "sample": 0, "output_tokens": [5, 6, 7], "answer_tokens": [7]}))
    with pytest.raises(ConfigError, match=r"trace\.jsonl:1: not a trajectory: 3 output_tokens, 1 answer_tokens"):
        from_trace(Workload(lengths="trace", path=str(path)), 0)


def test_the_wait_for_a_tool_is_counted_as_such_and_all_waits_add_up(run):
    for at in told(run):
        if at.purpose == "eval":
            continue
        found = waiting(at)
        assert found is not None and found.of("environment") > 0.1 * found.seconds and found.of("lost") < 1e-6
        assert sum(w.seconds for w in found.waits) == pytest.approx(found.seconds)
        diagnosis = diagnose(at)
        assert diagnosis is not None
        (tools,) = [f for f in diagnosis.findings if f.cause == "environment"]
        assert "was in tools for" in tools.text


def test_report_story_trace_and_page_show_tools(run):
    tools = report(run, "x")["run"]["tools"]
    calls = [t for at in told(run) if at.purpose == "train" for g in at.groups.values() for t in g.trajectories.values()]
    asked = sum(turn.tool is not None for t in calls for turn in t.turns)
    assert (
        tools["calls"] == asked and tools["turns_mean"] == sum(len(t.turns) for t in calls) / len(calls) and not tools["failed"]
    )
    words = " ".join(line.text for line in story(run, Target.parse(next(t.name for t in calls if len(t.turns) > 1))))
    assert "turn 0 to the environment" in words and "the environment answered turn 0 in" in words and "turn 1, after" in words
    trace.write(run, run.parent / "trace.json")
    events = json.loads((run.parent / "trace.json").read_text())["traceEvents"]
    held_out = sum(r["kind"] == "ToolFinished" and r["trajectory"][0] < 0 for r in read(run / "attempt-1"))
    assert sum(event.get("cat") == "tool" for event in events) == asked + held_out
    page = page_data.of_run(run, "x")
    assert sum(len(detail["tools"]) for detail in page["details"]) == asked
    assert sum(n for _, n in page["spread"]["tool_s"]) == asked

"""`rpipe story` and the trace, on logs of the real coordinators."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from rpipe.analysis import trace
from rpipe.analysis.run import RunError, read
from rpipe.analysis.story import Target, story
from rpipe.cli import main
from rpipe.policy.admission import Fifo
from tests.timed_job import TimedJob


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("story")
    world = {"rollout": {"admission": Fifo(), "evaluate": True}, "training": {"replicas": 2}}
    TimedJob(where / "attempt-1", **world, token_s=lambda engine: 0.05, loses=((3.0, 1),), unix_s=10.0, ends_at_s=12.0).run()
    TimedJob(where / "attempt-2", **world, unix_s=40.0).run()
    with (where / "attempt-2" / "events" / "rank00001.jsonl").open("a") as log:
        log.write('{"v":1,"t":90.0,"rank":1,"seq":9000,"io":"event","kind":"GroupSang","group":9,"song":"a"}\n')
        log.write('{"v":1,"t":91.0,"rank":1,"seq":9001,"io":"event","kind":"MoonRose","phase":"full"}\n')
    return where


def kinds(lines: list, attempt: int = 2) -> list[str]:
    return [line.record["kind"] for line in lines if line.attempt == attempt]


def test_a_trajectory_s_story_is_whole_and_of_it_alone(run: Path):
    lines = story(run, Target.parse("9.2"))
    told = kinds(lines)
    first = ["RolloutRequested", "SendTurn", "TurnStarted", "TurnFinished", "ScoreTrajectory", "TrajectoryScored"]
    assert [kind for kind in told if kind in first] == first
    for kind in (
        *first,
        "BeginStep",
        "ServingComplete",
        "SendGroup",
        "GroupArrived",
        "TrainMicroBatch",
        "MicroBatchDone",
        "FinishStep",
        "StepDone",
    ):
        assert told.count(kind) == 1, kind
    assert told[-2:] == ["WeightsPublished", "GroupSang"]  # what this version does not know is told, too
    assert {tuple(line.record["trajectory"]) for line in lines if "trajectory" in line.record} == {(9, 2)}
    done = next(line for line in lines if line.record["kind"] == "TurnFinished" and line.attempt == 2)
    assert f"{done.record['output_tokens']} tokens in " in done.text and "10 ms each on engine" in done.text


def test_a_lost_engine_is_in_the_story_of_what_ran_on_it(run: Path):
    moved = next(r["trajectory"] for r in read(run / "attempt-1") if r["kind"] == "SendTurn" and r["prefix_tokens"])
    lines = [line for line in story(run, Target.parse("{}.{}".format(*moved))) if line.attempt == 1]
    assert kinds(lines, 1)[:5] == ["RolloutRequested", "SendTurn", "TurnStarted", "EngineLost", "SendTurn"]
    assert "engine 1 was lost (silent for 30 s); 39 tokens are kept" in lines[3].text
    assert lines[4].text == "to engine 0, priority -1, going on from 39 tokens"


def test_a_step_s_story_holds_its_groups_and_micro_batches(run: Path):
    lines = [line for line in story(run, Target.parse("s2")) if line.attempt == 2]
    full = next(line for line in lines if line.record["kind"] == "FinishStep")
    assert {line.record["group"] for line in lines if line.record["kind"] == "GroupArrived"} == set(full.record["groups"])
    batches = {(r["replica"], r["micro_batch"]) for r in read(run / "attempt-2") if r.get("step") == 2 and "slices" in r}
    done = {(x.record["replica"], x.record["micro_batch"]) for x in lines if x.record["kind"] == "MicroBatchDone"}
    assert done == batches and kinds(lines).count("StepDone") == 1 and not any("trajectory" in x.record for x in lines)


def test_a_held_out_group_has_a_story(run: Path):
    assert "asked for in evaluation 0, order 1 of 3" in story(run, Target.parse("-2"))[0].text


def test_the_command_tells_it_and_refuses_what_is_no_id(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["story", str(run), "9.2"]) == 0
    out = capsys.readouterr().out
    assert "attempt 2" in out and "9.2  reward 0 in" in out and "GroupSang" in out
    assert main(["story", str(run), "s2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"attempt", "t", "kind"} <= set(rows[0])
    for wrong, message in (
        ("12.x", "not an id"),
        ("777", "nothing in the log touches it"),
        ("s999", "nothing in the log touches it"),
    ):
        assert main(["story", str(run), wrong]) == 2
        out, err = capsys.readouterr()
        assert out == "" and message in err and err.count("\n") == 1


# ---- the trace


def test_the_trace_holds_every_turn_micro_batch_and_step_on_one_calendar(run: Path, tmp_path: Path):
    count = trace.write(run, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == count
    records = [r for number in (1, 2) for r in read(run / f"attempt-{number}")]
    for kind, category in (
        ("TurnFinished", "generate"),
        ("MicroBatchDone", "micro-batch"),
        ("StepDone", "step"),
        ("WeightsPublished", "publish"),
    ):
        lost = category == "generate"  # what a lost engine had made is a bar of its own
        bars = [e for e in events if e.get("cat") == category and not (lost and e["args"]["finish"] == "lost")]
        assert len(bars) == sum(r["kind"] == kind for r in records), category
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert {"engine 0", "engine 1", "rewards", "trainer", "iterations", "events"} <= names
    second = [e for e in events if e.get("cat") == "attempt" and e["name"] == "starting" and e["args"]["attempt"] == 2]
    assert second[0]["ts"] == 30e6
    assert any(e["name"] == "MoonRose" and e["ts"] == 121e6 for e in events) and any(
        e["name"] == "engine 1 lost" for e in events
    )
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) > 20


def test_bars_of_one_thread_of_the_trace_do_not_overlap(run: Path, tmp_path: Path):
    trace.write(run, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X" and e["cat"] in ("queue", "generate", "reward", "micro-batch"):
            threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(threads) > 20
    for bars in threads.values():
        bars.sort()
        assert all(after[0] >= before[1] - 1 for before, after in pairwise(bars))


def test_a_trace_of_no_run_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match="no such directory"):
        trace.write(tmp_path / "nowhere", tmp_path / "trace.json")

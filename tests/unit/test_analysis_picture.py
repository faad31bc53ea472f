"""The picture of one iteration, from recorded jobs."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from rpipe.analysis.timeline import timeline, width
from rpipe.core.eventlog import records
from rpipe.report import main
from tests.replay.test_golden import GOLDEN


def run_of(tmp_path: Path, name: str) -> Path:
    shutil.copytree(GOLDEN / name, tmp_path / "run" / "attempt-1" / "events", ignore=shutil.ignore_patterns("*.yaml"))
    return tmp_path / "run"


def test_every_call_of_a_tool_has_its_place_and_no_two_overlap(tmp_path: Path):
    told = timeline(run_of(tmp_path, "tools"), 1)
    log = list(records(GOLDEN / "tools" / "rank00000.jsonl"))
    asked = next(r for r in log if r["kind"] == "RolloutRequested" and r["purpose"] == "train" and r["iteration"] == 1)
    groups = {spec["group"] for spec in asked["groups"]}
    answers = [r for r in log if r["kind"] == "ToolFinished" and r["trajectory"][0] in groups]
    assert len(answers) > 20, "the recorded job has an environment"
    expected = sorted((r["started_t"] - asked["t"], r["t"] - asked["t"]) for r in answers)
    assert sorted((bar.start, bar.end) for bar in told.tools) == expected
    assert {bar.step for bar in told.tools} == {bar.step for bars in told.turns.values() for bar in bars}
    for lane in range(width(told.tools)):
        mine = sorted((bar.start, bar.end) for bar in told.tools if bar.lane == lane)
        assert mine and all(end <= start for (_, end), (start, _) in pairwise(mine))


@pytest.mark.parametrize("name", ["tools", "fifo"])
def test_tools_have_a_lane_of_their_own_where_a_run_used_any(name: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    from rpipe.analysis.picture import figure

    run = run_of(tmp_path, name)
    told = timeline(run, None)
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in figure(told).axes]
    assert labels[0] == [f"engine {engine}\n{slots} slots" for engine, slots in told.slots.items()]
    tools = [[f"tools\n{width(told.tools)} at once"]] if name == "tools" else []
    assert labels[1:-2] == tools and labels[-2][0] == "groups complete" and labels[-1][0].startswith("group ")
    assert main([str(run), "--timeline", str(tmp_path / "picture.svg")]) == 0
    assert (tmp_path / "picture.svg").stat().st_size > 10_000

"""Recorded coordinators' histories: do today's coordinators decide as they did when the log was written?

A change of a policy that is meant to change decisions records them anew: `python -m tests.replay.record`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rpipe import config
from rpipe.control.rollout import RolloutCoordinator
from rpipe.control.settings import rollout_settings, training_settings
from rpipe.control.training import TrainingCoordinator
from rpipe.core.eventlog import records, steps

GOLDEN = Path(__file__).parent / "golden"
RUNS = sorted(p.name for p in GOLDEN.iterdir() if p.is_dir())


def test_there_is_a_recording_of_each_mode_and_one_with_tools():
    assert RUNS == ["exact", "fifo", "serial", "tools"]
    assert {"RunTool", "ToolFinished"} <= {r["kind"] for r in records(GOLDEN / "tools" / "rank00000.jsonl")}


def test_a_log_from_before_there_were_turns_is_read_and_replayed(tmp_path):
    old = [dict(r) for r in records(GOLDEN / "fifo" / "rank00000.jsonl")]
    for record in old:
        if record["kind"] == "SendTurn":
            assert (record.pop("turn"), record.pop("history_tokens")) == (0, 0)
    (tmp_path / "rank00000.jsonl").write_text("".join(json.dumps(record) + "\n" for record in old))
    assert list(steps(tmp_path / "rank00000.jsonl")) == list(steps(GOLDEN / "fifo" / "rank00000.jsonl"))


@pytest.mark.parametrize("name", RUNS)
def test_the_rollout_coordinator_decides_as_recorded(name):
    coordinator = RolloutCoordinator(rollout_settings(config.load(GOLDEN / name / "config.yaml")))
    for number, (event, commands) in enumerate(steps(GOLDEN / name / "rank00000.jsonl")):
        assert coordinator.on(event) == commands, f"event {number}: {event}"
    assert coordinator.done


@pytest.mark.parametrize("name", RUNS)
def test_the_training_coordinator_decides_as_recorded(name):
    coordinator = TrainingCoordinator(training_settings(config.load(GOLDEN / name / "config.yaml")))
    for number, (event, commands) in enumerate(steps(GOLDEN / name / "rank00001.jsonl")):
        assert coordinator.on(event) == commands, f"event {number}: {event}"
    assert coordinator.done


def test_another_policy_decides_otherwise():
    settings = config.load(GOLDEN / "fifo" / "config.yaml", ["admission.frontier_groups=1"])
    coordinator = RolloutCoordinator(rollout_settings(settings))
    recorded = list(steps(GOLDEN / "fifo" / "rank00000.jsonl"))
    request = next(i for i, (event, _) in enumerate(recorded) if getattr(event, "purpose", "") == "train")
    answers = [coordinator.on(event) for event, _ in recorded[: request + 1]]
    assert answers[:-1] == [commands for _, commands in recorded[:request]]
    assert answers[-1] != recorded[request][1]

"""Five causes are injected into jobs of the real coordinators; the diagnosis must name each, and nothing else first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpipe.analysis.collect import collect
from rpipe.analysis.diagnosis import Diagnosis, diagnose
from rpipe.analysis.run import read
from rpipe.analysis.summary import report
from rpipe.analysis.totals import Totals
from rpipe.analysis.waiting import waiting
from rpipe.core.types import TrajectoryId
from rpipe.policy.admission import Fifo, Frontier
from tests.timed_job import TimedJob


def diagnosed(directory: Path, **world: Any) -> list[Diagnosis]:
    TimedJob(directory, **world).run()
    details, _ = collect(read(directory))
    return [told for detail in details if (told := diagnose(detail)) is not None]


def totals(found: list[Diagnosis]) -> Totals:
    whole = Totals()
    for one in found:
        whole.add(one)
    return whole


EVEN: dict[str, Any] = {"rollout": {"admission": Frontier(4)}, "training": {"replicas": 1}}


def test_an_even_job_has_no_culprit(tmp_path: Path):
    whole = totals(diagnosed(tmp_path, **{**EVEN, "rollout": {"admission": Fifo()}}))
    assert not {"straggler", "slow engine", "slow reward", "narrow frontier", "slow publish"} & set(whole.worst)


def test_a_straggler_is_named_with_its_group_its_ratio_and_its_points(tmp_path: Path):
    found = diagnosed(tmp_path, **EVEN, tokens=lambda t: 1000 if tuple(t) == (12, 3) else 100)
    second = found[1]
    assert second.findings[0].cause == "straggler"
    assert (second.findings[0].group, second.findings[0].trajectory) == (12, 3)
    # requested at 0; the others train meanwhile; 10 s of generation where the median is 1 s
    assert "group 12, whose trajectory 3 ran 10.0x the median (1,000 tokens, median 100)" in second.sentence
    points = round(second.findings[0].points * 100)
    assert points > 50 and f"; {points} points of it for group 12" in second.sentence
    assert not any(finding.cause == "straggler" for finding in found[0].findings)


def test_one_trajectory_decoded_slowly_is_not_called_a_straggler(tmp_path: Path):
    found = diagnosed(tmp_path, **EVEN, tokens=lambda t: 100, slow_turns={TrajectoryId(12, 3): 8.0})
    top = found[1].findings[0]
    assert (top.cause, top.group, top.trajectory) == ("slow decoding", 12, 3)
    assert "trajectory 12.3 needed 80.8 ms a token, the median is 10.1 ms (8.0x)" in found[1].sentence
    assert not any(finding.cause == "straggler" for told in found for finding in told.findings)


def test_a_slow_engine_is_named_with_its_pace(tmp_path: Path):
    whole = totals(diagnosed(tmp_path, **EVEN, token_s=lambda engine: 0.04 if engine == 1 else 0.01))
    assert next(iter(whole.shares())) == "slow engine"
    assert "engine 1 needs 40." in whole.worst["slow engine"].text and "the others 10." in whole.worst["slow engine"].text
    assert "(4.0x)" in whole.worst["slow engine"].text


def test_a_slow_reward_is_named_with_its_seconds(tmp_path: Path):
    whole = totals(diagnosed(tmp_path, **EVEN, reward_s=lambda t: 6.0 if t.group % 4 == 2 else 0.01))
    assert next(iter(whole.shares())) == "slow reward"
    text = whole.worst["slow reward"].text
    assert "took 6 s" in text and "0.6 s of it waiting for a free reward worker" in text


def test_a_frontier_too_narrow_is_named_with_its_width(tmp_path: Path):
    world = {"rollout": {"admission": Frontier(1)}, "training": {"replicas": 1}}
    whole = totals(diagnosed(tmp_path, **world))
    assert next(iter(whole.shares())) == "narrow frontier"
    assert "at most 1 groups were in service while up to 7 were deferred" in whole.worst["narrow frontier"].text


def test_a_slow_publish_is_named_with_its_share_and_its_engine(tmp_path: Path):
    whole = totals(diagnosed(tmp_path, **EVEN, update_s=lambda engine: 3.0 if engine == 1 else 0.1))
    text = whole.worst["slow publish"].text
    assert "publishing took 3 s" in text and "engine 1 took 3 s of it, the others 0.1 s" in text
    assert whole.worst["slow publish"].points > 0.3
    assert any("publishing took 3 s" in line for line in whole.sentences())


def test_a_lost_engine_is_told_with_what_went_on_elsewhere(tmp_path: Path):
    world = {**EVEN, "rollout": {"admission": Fifo()}, "token_s": lambda engine: 0.05}
    TimedJob(tmp_path / "attempt-1", **world, loses=((3.0, 1),), restart_s=9.0).run()
    told = report(tmp_path, "x")["run"]
    # the rollout begins at 1.02 s, first tokens come 0.02 s later: 39 tokens by 3.0 s, on 16 trajectories
    assert told["diagnosis"][-1] == (
        "engine 1 was lost at 3.0 s (silent for 30 s), back after 9.0 s;"
        " 16 trajectories went on elsewhere, with 624 tokens that they had"
    )
    assert told["other_events"] == {}
    details, _ = collect(read(tmp_path / "attempt-1"))
    moved = [t for t in details[0].trajectories() if len(t.turns) == 2]
    assert len(moved) == 16 and all(t.turns[0].finish == "lost" and t.turns[1].finish == "stop" for t in moved)
    assert {t.tokens for t in moved} <= set(range(90, 110)) and {t.turns[0].output_tokens for t in moved} == {39}


def test_both_engines_lost_is_what_the_trainer_waited_for(tmp_path: Path):
    found = diagnosed(tmp_path, **EVEN, loses=((1.5, 0), (1.5, 1)), restart_s=20.0)
    assert next(iter(totals(found).shares())) == "lost engine"
    assert "points of it for a lost engine" in found[0].sentence


def test_dropped_groups_are_told_with_what_they_cost(tmp_path: Path):
    world = {"rollout": {"admission": Fifo(), "drop_zero_variance": True}, "training": {"replicas": 1}}
    whole = totals(diagnosed(tmp_path, **world, reward=lambda t: float(t.group % 2 == 0 and t.sample % 2)))
    assert "4 of 8 groups were dropped (zero variance): 5" in whole.worst["dropped groups"].text


def test_a_busy_trainer_is_called_the_bottleneck(tmp_path: Path):
    found = diagnosed(tmp_path, **{**EVEN, "rollout": {"admission": Fifo()}}, train_token_s=0.01)
    assert all(told.sentence.endswith("training is the bottleneck") for told in found)


@pytest.mark.parametrize("mode", ["serial", "exact", "fifo"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_second_of_waiting_has_one_cause(tmp_path: Path, mode: str, replicas: int):
    world = {"rollout": {"admission": Frontier(2)}, "training": {"mode": mode, "replicas": replicas}}
    TimedJob(tmp_path, **world, tokens=lambda t: 20 + (37 * t.group + 53 * t.sample) % 200).run()
    details, _ = collect(read(tmp_path))
    assert len(details) == 3
    for detail in details:
        told = diagnose(detail)
        assert told is not None and detail.train_ended_t is not None and detail.requested_t is not None
        busy_s = sum(b.ended_t - b.started_t for b in detail.micro_batches if b.ended_t and b.started_t) / replicas
        busy_s += sum(s.ended_t - s.started_t for s in detail.steps.values() if s.ended_t and s.started_t)
        whole_s = detail.train_ended_t - detail.requested_t
        assert told.waited_s == pytest.approx(whole_s - busy_s) and sum(told.seconds.values()) == pytest.approx(told.waited_s)
        assert ("serial" in told.seconds) == (mode == "serial")


def test_groups_drawn_later_in_place_of_dropped_ones_belong_to_their_iteration(tmp_path: Path):
    world = {"rollout": {"admission": Fifo(), "drop_zero_variance": True, "refill_groups": 4}, "training": {"replicas": 1}}
    TimedJob(tmp_path / "attempt-1", **world, reward=lambda t: float(t.group % 12 >= 4 and t.sample % 2)).run()
    details, track = collect(read(tmp_path / "attempt-1"))
    assert track.marked == {}
    drawn = [r for r in read(tmp_path / "attempt-1") if r["kind"] == "GroupsDrawn"]
    more = {spec["group"] for r in drawn if r["iteration"] == 0 for spec in r["groups"]}
    assert more and more <= set(details[0].groups)
    trained = {group for step in details[0].steps.values() for group in step.groups}
    assert more & trained and not any(details[0].groups[group].dropped for group in more & trained)


def test_in_serial_mode_the_first_wait_is_for_the_group_that_ended_the_rollout(tmp_path: Path):
    world = {"rollout": {"admission": Fifo()}, "training": {"mode": "serial", "replicas": 1}}
    TimedJob(tmp_path, **world, tokens=lambda t: 150 if tuple(t) == (10, 2) else 100).run()
    details, _ = collect(read(tmp_path))
    told = waiting(details[1])
    assert told is not None and told.serial
    assert (told.waits[0].phase, told.waits[0].group, told.waits[0].trajectory) == ("generating", 10, 2)


def test_a_trainer_whose_clock_is_a_little_late_keeps_its_events_in_their_iteration(tmp_path: Path):
    TimedJob(tmp_path, **EVEN).run()
    exact, _ = collect(read(tmp_path))
    late = [{**r, "t": r["t"] + 0.004} if r["rank"] else r for r in read(tmp_path)]
    details, _ = collect(sorted(late, key=lambda r: r["t"]))
    assert [d.iteration for d in details] == [d.iteration for d in exact] == [0, 1, 2]
    for detail, before in zip(details, exact):
        assert detail.publish is not None and detail.publish.version == detail.iteration + 1
        assert set(detail.publish.engines) == {0, 1} and detail.steps.keys() == before.steps.keys()
        assert all(step.ended_t is not None for step in detail.steps.values())

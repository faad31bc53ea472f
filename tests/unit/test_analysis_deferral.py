"""A deferral counts as admission's doing only while an engine had room; a straggler that it did not cause keeps its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpipe.analysis.causes import Usual
from rpipe.analysis.collect import collect
from rpipe.analysis.deferral import deferred_s
from rpipe.analysis.diagnosis import diagnose
from rpipe.analysis.run import read
from rpipe.analysis.spans import Detail, Group, Trajectory, Turn
from rpipe.policy.admission import Frontier
from tests.timed_job import TimedJob

USUAL = Usual(generating_s=4.0, tokens=100, token_s=0.04, pace_s={})  # so that a queue is a wait of more than 1 s


def group(number: int, *turns: tuple[int, float, float, float], served_t: float | None = None) -> Group:
    """Requested at 0; a trajectory for each (engine, sent, first token, end)."""
    made = Group(number, number, 0.0, served_t=served_t)
    for sample, (engine, sent_t, first_t, ended_t) in enumerate(turns):
        turn = Turn(engine, sent_t, sent_t, first_t, ended_t, output_tokens=100)
        made.trajectories[sample] = Trajectory(number, sample, [turn])
    return made


def deferred(*groups: Group) -> dict[int, float]:
    return deferred_s(Detail(0, requested_t=0.0, groups={g.group: g for g in groups}), USUAL)


def test_while_every_engine_has_a_queue_a_deferral_does_not_count():
    waiting = group(9, (0, 10.0, 10.1, 14.0), (1, 10.0, 10.1, 14.0))
    idle = group(0, (0, 0.0, 0.1, 9.0), (1, 0.0, 0.1, 9.0))
    assert deferred(idle, waiting) == {0: 0.0, 9: 10.0}
    one_queues = group(0, (0, 0.0, 6.0, 9.0), (1, 0.0, 0.1, 9.0))
    assert deferred(one_queues, waiting)[9] == 10.0, "the other had room"
    both_queue = group(0, (0, 0.0, 6.0, 9.0), (1, 2.0, 12.0, 13.0), (1, 0.0, 0.1, 9.0))
    assert deferred(both_queue, waiting)[9] == pytest.approx(10.0 - 4.0)


def test_a_group_that_came_in_for_an_ended_trajectory_waited_for_a_place_and_not_for_the_frontier():
    late = group(9, (0, 7.0, 7.1, 11.0))
    assert deferred(group(0, (0, 0.0, 0.1, 7.0), (1, 0.0, 0.1, 9.0), served_t=9.0), late)[9] == 0.0
    assert deferred(group(0, (0, 0.0, 0.1, 7.0), (1, 0.0, 0.1, 6.0), served_t=7.0), late)[9] == 7.0


def test_a_straggler_that_was_not_deferred_is_named_though_others_were(tmp_path: Path):
    """Group 8 is admitted at once and holds a frontier of one: its length is the first cause, the frontier the second."""
    world = {"rollout": {"admission": Frontier(1)}, "training": {"replicas": 1}}
    TimedJob(tmp_path, **world, tokens=lambda t: 1000 if tuple(t) == (8, 3) else 100).run()
    details, _ = collect(read(tmp_path))
    told = diagnose(details[1])
    assert told is not None
    named = {finding.cause: finding for finding in told.findings}
    assert told.findings[0].cause == "straggler" and (named["straggler"].group, named["straggler"].trajectory) == (8, 3)
    assert told.seconds["straggler"] == pytest.approx(9.0, rel=0.02), "what it took beyond the median's second"
    assert named["narrow frontier"].group != 8


def test_a_deferral_is_put_on_no_more_seconds_than_it_took(tmp_path: Path):
    """Each group of a frontier of two is deferred for some of its own wait; no wait counts it twice."""
    world = {"rollout": {"admission": Frontier(2)}, "training": {"replicas": 1}}
    TimedJob(tmp_path, **world, tokens=lambda t: 400 if t.sample == 1 else 100).run()
    details, _ = collect(read(tmp_path))
    for detail in details:
        told = diagnose(detail)
        assert told is not None and told.seconds["narrow frontier"] > 0
        assert told.seconds["narrow frontier"] <= sum(deferred_s(detail, Usual.of(detail)).values())

"""Trajectories of several turns, in the coordinator: one claim a test, with events written by hand."""

from __future__ import annotations

import pytest

from rpipe.core import events as e
from rpipe.core.types import TrajectoryId
from rpipe.policy.admission import Fifo, Frontier
from rpipe.policy.placement import LeastLoaded
from tests.unit.test_coordinators import finished, running, scored


def started(group, sample, engine, t=1.5):
    return e.TurnStarted(t=t, trajectory=TrajectoryId(group, sample), engine=engine)


def answered(group, sample, turn=0, tokens=3, done=False, t=3.0):
    return e.ToolFinished(
        t=t, trajectory=TrajectoryId(group, sample), turn=turn, observation_tokens=tokens, done=done, started_t=2.0
    )


def with_tools(**changes):
    return running(**{"admission": Fifo(), "max_turns": 3, **changes})[0]


def test_an_ended_turn_asks_the_environment_and_its_answer_starts_the_next_turn_where_the_prefix_is():
    coordinator = with_tools()
    assert coordinator.on(finished(0, 1, engine=1)) == [e.RunTool(trajectory=TrajectoryId(0, 1), turn=0)]
    assert "in a tool" in coordinator.groups[0].trajectories[1].state.value
    (sent,) = coordinator.on(answered(0, 1))
    assert (sent.engine, sent.priority, sent.version) == (1, 0, 0)
    assert (sent.turn, sent.history_tokens, sent.prefix_tokens) == (1, 5 + 3, 0)


def test_the_environment_ends_a_trajectory_and_so_does_its_last_turn():
    coordinator = with_tools(max_turns=2)
    coordinator.on(finished(0, 0))
    assert coordinator.on(answered(0, 0, done=True, tokens=0)) == [e.ScoreTrajectory(trajectory=TrajectoryId(0, 0))]
    coordinator.on(finished(0, 1, engine=1))
    coordinator.on(answered(0, 1))
    assert coordinator.on(finished(0, 1, engine=1))[0] == e.ScoreTrajectory(trajectory=TrajectoryId(0, 1))
    assert [t.output_tokens for t in coordinator.groups[0].trajectories] == [5, 5 + 3 + 5]


@pytest.mark.parametrize("finish", ["length", "abort", "deadline"])
def test_a_turn_that_was_cut_calls_no_tool(finish):
    coordinator = with_tools()
    assert coordinator.on(finished(0, 0, finish=finish)) == [e.ScoreTrajectory(trajectory=TrajectoryId(0, 0))]


def test_turns_and_answers_share_max_new_tokens_and_an_answer_without_room_is_left_out():
    coordinator = with_tools(max_new_tokens=12)
    assert isinstance(coordinator.on(finished(0, 0))[0], e.RunTool)
    assert coordinator.on(answered(0, 0, tokens=7)) == [e.ScoreTrajectory(trajectory=TrajectoryId(0, 0))]
    assert coordinator.groups[0].trajectories[0].output_tokens == 5
    coordinator = with_tools(max_new_tokens=5)
    assert coordinator.on(finished(0, 0)) == [e.ScoreTrajectory(trajectory=TrajectoryId(0, 0))]


def test_a_tool_holds_no_slot_but_its_group_stays_in_service():
    coordinator = with_tools(admission=Frontier(1))
    coordinator.on(started(0, 0, 0))
    before = coordinator.turns.in_flight[0]
    assert coordinator.on(finished(0, 0)) == [e.RunTool(trajectory=TrajectoryId(0, 0), turn=0)]
    assert coordinator.turns.in_flight[0] == before - 1 and coordinator.groups_in_service == 1
    assert coordinator.groups_deferred == 2, "its place in the frontier is not given away"


def test_what_is_left_of_a_deadline_is_for_the_next_turn_and_does_not_run_in_a_tool():
    coordinator = with_tools(trajectory_deadline_s=10.0)
    coordinator.on(started(0, 0, 0, t=2.0))
    assert coordinator.next_deadline_t == 12.0
    coordinator.on(finished(0, 0, t=5.0))
    assert coordinator.next_deadline_t is None
    coordinator.on(answered(0, 0, t=100.0))
    coordinator.on(started(0, 0, 0, t=101.0))
    assert coordinator.next_deadline_t == 108.0
    assert coordinator.on(e.DeadlinePassed(t=108.0)) == [e.AbortTurn(trajectory=TrajectoryId(0, 0), engine=0)]


def test_an_engine_lost_during_a_tool_costs_nothing_but_the_prefix_in_its_cache():
    coordinator = with_tools()
    coordinator.on(finished(0, 0))
    coordinator.on(e.EngineLost(t=2.5, engine=0, reason="killed"))
    coordinator.on(e.EngineRestarted(t=2.8, engine=0, version=0, started_t=2.5))
    coordinator.turns.in_flight[0] = 10  # both serve; engine 0 holds nothing of it any more, and has more to do
    (sent,) = coordinator.on(answered(0, 0))
    assert sent.engine == 1 and sent.history_tokens == 8


def test_where_no_engine_serves_the_next_turn_waits_for_one():
    coordinator = with_tools(engine_restarts=9)
    coordinator.on(finished(0, 0))
    for engine in (0, 1):
        coordinator.on(e.EngineLost(t=2.5, engine=engine, reason="killed"))
    assert coordinator.on(answered(0, 0)) == []
    assert "started again" in coordinator.waiting_for()
    sent = coordinator.on(e.EngineRestarted(t=4.0, engine=1, version=0, started_t=2.5))
    assert {c.engine for c in sent if isinstance(c, e.SendTurn)} == {1}
    assert [c.history_tokens for c in sent if isinstance(c, e.SendTurn) and c.trajectory == TrajectoryId(0, 0)] == [8]


def test_a_turn_that_goes_on_after_a_loss_keeps_its_history_and_its_prefix():
    coordinator = with_tools()
    coordinator.on(finished(0, 0))
    coordinator.on(answered(0, 0))
    lost = e.EngineLost(t=4.0, engine=0, reason="killed", prefixes=(e.Prefix(TrajectoryId(0, 0), 2),))
    sent = [c for c in coordinator.on(lost) if isinstance(c, e.SendTurn) and c.trajectory == TrajectoryId(0, 0)]
    assert [(c.engine, c.turn, c.history_tokens, c.prefix_tokens) for c in sent] == [(1, 1, 8, 2)]


def test_a_group_that_is_not_needed_any_more_waits_for_its_tool_and_scores_nothing():
    coordinator, _ = running(
        groups=2, samples=1, admission=Fifo(), max_turns=2, over_sampling_groups=1, drop_zero_variance=False
    )
    coordinator.on(finished(1, 0, engine=1))  # group 1, drawn ahead, is in a tool
    coordinator.on(finished(0, 0))
    coordinator.on(answered(0, 0, done=True))
    ended = coordinator.on(scored(0, 0, 1.0))
    assert [type(c) for c in ended] == [e.SendGroup]
    assert "answer turn 0 of trajectory 1.0" in coordinator.waiting_for()
    last = coordinator.on(answered(1, 0))
    assert [type(c) for c in last] == [e.DropGroup, e.EndRollout] and last[0].reason == "surplus"


def test_an_answer_that_nobody_asked_for_is_caught():
    coordinator = with_tools()
    with pytest.raises(AssertionError, match=r"trajectory 0\.0: nobody asked about its turn 0"):
        coordinator.on(answered(0, 0))
    coordinator.on(finished(0, 0))
    with pytest.raises(AssertionError, match="nobody asked about its turn 1"):
        coordinator.on(answered(0, 0, turn=1))


def test_placement_balances_by_what_runs_not_by_what_is_in_tools():
    coordinator = with_tools(groups=1, samples=3, placement=LeastLoaded())
    coordinator.on(finished(0, 0, engine=0))
    coordinator.on(finished(0, 2, engine=0))
    assert [coordinator.turns.in_flight[engine] for engine in (0, 1)] == [0, 1]

"""What must hold where trajectories take several turns, whatever arrives first: tools, losses of engines, cut groups."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rpipe.core import events as e
from rpipe.core.types import TrajectoryId
from tests.pure_job import PureJob, admission, rollout_settings, training_settings

widths = st.sampled_from([None, 1, 3])
WANTED = Counter(TrajectoryId(g, s) for g in range(12) for s in range(4))


def job(data, width, losses=8, **changes):
    random = data.draw(st.randoms(use_true_random=False))
    moments = {random.randrange(400): random.randrange(2) for _ in range(losses)}
    made = PureJob(
        rollout_settings(
            admission=admission(width), engine_restarts=1000, max_turns=3, **{"max_new_tokens": 70, "evaluate": True, **changes}
        ),
        training_settings(), groups=6, samples=4, choose=random.randrange, lose=moments.get,
    )  # fmt: skip
    made.turns = lambda t: 1 + (t.group + t.sample) % 4  # the last of four is beyond max_turns
    made.length = lambda t: 2 + (7 * t.group + 3 * t.sample) % 30
    return made


def taken(run: PureJob, t: TrajectoryId) -> tuple[int, int]:
    """(turns, tokens of the response) by the rules alone."""
    tokens, limit = 0, run.rollout_settings.max_new_tokens
    for turn in range(3):
        tokens += run.length(t)
        if turn == 2 or turn + 1 >= run.turns(t) or tokens + run.answer_tokens >= limit:
            return turn + 1, tokens
        tokens += run.answer_tokens
    raise AssertionError


@settings(max_examples=60, deadline=None)
@given(st.data(), widths)
def test_no_trajectory_is_lost_or_doubled_and_none_takes_more_turns_than_it_should(data, width):
    run = job(data, width).run()
    assert run.rollout.done and run.training.done
    turns = Counter(x.trajectory for x, _ in run.rollout_history if isinstance(x, e.TurnFinished) and x.trajectory.group >= 0)
    assert turns == Counter({t: taken(run, t)[0] for t in WANTED})
    assert Counter(c.trajectory for c in run.rollout_commands(e.ScoreTrajectory) if c.trajectory.group >= 0) == WANTED
    arrived = {x.group: x.tokens for x, _ in run.training_history if isinstance(x, e.GroupArrived)}
    assert arrived == {g: tuple(4 + taken(run, TrajectoryId(g, s))[1] for s in range(4)) for g in range(12)}
    asked = Counter((c.trajectory, c.turn) for c in run.rollout_commands(e.RunTool) if c.trajectory.group >= 0)
    assert set(asked.values()) <= {1} and not run.rollout.turns.busy and run.rollout.next_deadline_t is None
    assert all(run.rollout.turns.in_flight[engine] == 0 for engine in run.rollout.engines.serving)


@settings(max_examples=40, deadline=None)
@given(st.data(), widths)
def test_a_next_turn_goes_where_its_prefix_is_unless_that_engine_was_lost(data, width):
    run = job(data, width).run()
    at: dict[TrajectoryId, int] = {}
    history: Counter[TrajectoryId] = Counter()
    for event, commands in run.rollout_history:
        match event:
            case e.RolloutRequested():
                at.clear()
                history.clear()
            case e.TurnFinished():
                at[event.trajectory] = event.engine
                history[event.trajectory] += event.output_tokens
            case e.ToolFinished():
                history[event.trajectory] += event.observation_tokens
            case e.EngineLost():
                at = {trajectory: engine for trajectory, engine in at.items() if engine != event.engine}
        for c in commands:
            if isinstance(c, e.SendTurn):
                assert c.history_tokens == history[c.trajectory]
                if c.turn and not c.prefix_tokens:
                    assert at.get(c.trajectory, c.engine) == c.engine


@settings(max_examples=40, deadline=None)
@given(st.data(), widths, st.sets(st.integers(0, 8)))
def test_with_groups_cut_and_drawn_anew_the_first_kept_are_trained(data, width, dull):
    run = job(data, width, drop_zero_variance=True, refill_groups=2, over_sampling_groups=1)
    run.reward = lambda t: 1.0 if t.group % run.most_groups in dull else float(t.sample % 2)
    run.run()
    assert run.rollout.done and run.training.done
    kept = [order for order in range(run.most_groups) if order not in dull][:6]
    for iteration in (0, 1):
        steps = [s for s in run.training_commands(e.FinishStep) if s.iteration == iteration]
        assert sorted(group - iteration * run.most_groups for s in steps for group in s.groups) == kept


@settings(max_examples=30, deadline=None)
@given(st.data(), widths)
def test_replaying_a_history_with_tools_gives_the_same_commands(data, width):
    run = job(data, width).run()
    again = PureJob(run.rollout_settings, run.training_settings, 6, 4, lambda n: 0)
    assert [again.rollout.on(event) for event, _ in run.rollout_history] == [c for _, c in run.rollout_history]

"""What must hold whatever arrives first: both coordinators in a world that delivers in any order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rpipe.core import events as e
from rpipe.core.types import TrajectoryId
from rpipe.policy.admission import SoftFrontier
from tests.pure_job import PureJob, admission, rollout_settings, training_settings

modes = st.sampled_from(["serial", "fifo", "exact"])
widths = st.sampled_from([None, 1, 2, 3])


def job(draw_choice, mode="fifo", width=2, span=False, replicas=2, drop=False, evaluate=False, reward=None, groups=6, **cut):
    rollout = rollout_settings(admission=admission(width), drop_zero_variance=drop, evaluate=evaluate)
    training = training_settings(mode=mode, span_groups=span, replicas=replicas, **cut)
    made = PureJob(rollout, training, groups=groups, samples=4, choose=draw_choice)
    if reward is not None:
        made.reward = reward
    return made.run()


def choice(data: st.DataObject):
    random = data.draw(st.randoms(use_true_random=False))
    return random.randrange


@settings(max_examples=60, deadline=None)
@given(st.data(), modes, widths, st.booleans(), st.integers(1, 3))
def test_every_trajectory_is_sampled_scored_and_trained_once(data, mode, width, span, replicas):
    run = job(choice(data), mode, width, span and mode != "exact", replicas, evaluate=True)
    trained = Counter(
        TrajectoryId(s.group, sample)
        for c in run.training_commands(e.TrainMicroBatch)
        for s in c.slices
        for sample in s.samples
    )
    wanted = {TrajectoryId(g, s) for g in range(12) for s in range(4)}
    assert trained == Counter(wanted)
    assert Counter(c.trajectory for c in run.rollout_commands(e.SendTurn) if c.trajectory.group >= 0) == Counter(wanted)
    assert Counter(c.group for c in run.rollout_commands(e.SendGroup)) == Counter(range(12))
    assert run.training.done and run.rollout.done
    assert [c.version for c in run.training_commands(e.PublishWeights)] == [0, 1, 2]


@settings(max_examples=60, deadline=None)
@given(st.data(), modes, st.integers(1, 3))
def test_a_step_consumes_exactly_its_groups_and_nothing_crosses_an_iteration(data, mode, replicas):
    run = job(choice(data), mode, replicas=replicas)
    steps = run.training_commands(e.FinishStep)
    assert [len(s.groups) for s in steps] == [2] * 6
    assert all(group // 6 == step.iteration for step in steps for group in step.groups)
    open_step = None
    for _, commands in run.training_history:
        for c in commands:
            if isinstance(c, e.BeginStep):
                assert open_step is None
                open_step = c.step
            elif isinstance(c, e.TrainMicroBatch):
                assert c.step == open_step, "a micro-batch outside its step"
            elif isinstance(c, e.FinishStep):
                assert c.step == open_step
                open_step = None
            elif isinstance(c, e.PublishWeights):
                assert open_step is None, "weights published inside a step"


@settings(max_examples=60, deadline=None)
@given(st.data(), widths, st.integers(1, 3), st.integers(1, 3), st.sampled_from([20, 100]), st.integers(1, 2))
def test_exact_mode_accumulates_what_serial_does_in_the_same_order_on_the_same_replicas(
    data, width, replicas, pipeline_stages, micro_batch_tokens, peers
):
    cut = {"pipeline_stages": pipeline_stages, "micro_batch_tokens": micro_batch_tokens, "peers": peers}
    exact = job(choice(data), "exact", width, replicas=replicas, **cut)
    serial = job(choice(data), "serial", None, replicas=replicas, **cut)
    assert exact.accumulation() == serial.accumulation()


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_a_hard_frontier_never_serves_more_groups_than_its_width(data, width):
    run = job(choice(data), width=width)
    open_groups: set[int] = set()
    for _, commands in run.rollout_history:
        for c in commands:
            if isinstance(c, e.SendTurn):
                open_groups.add(c.trajectory.group)
                assert len(open_groups) <= width
            elif isinstance(c, e.ServingComplete):
                open_groups.remove(c.group)


@settings(max_examples=60, deadline=None)
@given(st.data(), modes, st.sets(st.integers(0, 11)))
def test_dropped_groups_leave_short_steps_and_wedge_nothing(data, mode, dull):
    run = job(choice(data), mode, drop=True, reward=lambda t: 1.0 if t.group in dull else float(t.sample % 2))
    kept = [g for g in range(12) if g not in dull]
    trained = [g for s in run.training_commands(e.FinishStep) for g in s.groups]
    assert sorted(trained) == kept
    for iteration in (0, 1):
        sizes = [len(s.groups) for s in run.training_commands(e.FinishStep) if s.iteration == iteration]
        assert all(size == 2 for size in sizes[:-1])
    assert run.training.done and run.rollout.done


@settings(max_examples=100, deadline=None)
@given(st.data(), modes, widths, st.sets(st.integers(0, 10)), st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_the_first_groups_kept_as_submitted_are_trained_whatever_finishes_first(data, mode, width, dull, refill, ahead, hook):
    """6 are wanted of at most 11; a group id modulo what one iteration may draw is its submission order."""
    policy = {"admission": admission(width), "refill_groups": refill, "over_sampling_groups": ahead}
    policy |= {"filter_function": "a:b"} if hook else {"drop_zero_variance": True}
    choose = choice(data)
    lost = {choose(250): choose(2) for _ in range(choose(8))}  # engines, at some moments
    run = PureJob(
        rollout_settings(**policy, engine_restarts=1000), training_settings(mode=mode),
        groups=6, samples=4, choose=choose, lose=lost.get,
    )  # fmt: skip
    most = run.most_groups
    for group in {choose(most) for _ in range(choose(4))}:  # finished by an attempt that was interrupted
        rewards = (1.0,) * 4 if group in dull and not hook else (0.0, 1.0, 0.0, 1.0)
        run.kept[group] = e.GroupSpec(group, 4, output_tokens=(5,) * 4, rewards=rewards)
    if hook:
        run.keeps = lambda group: group % most not in dull
    else:
        run.reward = lambda t: 1.0 if t.group % most in dull else float(t.sample % 2)
    run.run()
    assert run.training.done and run.rollout.done
    kept = [order for order in range(most) if order not in dull][:6]
    for iteration in (0, 1):
        steps = [s for s in run.training_commands(e.FinishStep) if s.iteration == iteration]
        assert sorted(group - iteration * most for s in steps for group in s.groups) == kept
        assert all(len(s.groups) == 2 for s in steps[:-1])
        ended = [c for c in run.rollout_commands(e.DropGroup) + run.rollout_commands(e.SendGroup) if c.iteration == iteration]
        assert sorted(c.order for c in ended) == list(range(run.drawn[iteration])), "each that was drawn is sent or dropped"
        end = kept[-1] + 1 if len(kept) == 6 else most
        assert run.drawn[iteration] == min(end + ahead, most), "as many, whatever finishes first"
    cut = {c.trajectory.group for c in run.rollout_commands(e.AbortTurn)}
    assert cut <= {c.group for c in run.rollout_commands(e.DropGroup) if c.reason == "surplus"}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from([1e-6, 1.0, 1e6]), st.sampled_from([None, 60, 200]))
def test_a_soft_frontier_fills_the_engines_where_rollout_is_the_bottleneck(data, width, busy_s, budget):
    run = PureJob(
        rollout_settings(admission=SoftFrontier(width, 2, budget), slots_per_engine=6), training_settings(),
        groups=9, samples=4, choose=choice(data),
    )  # fmt: skip
    run.busy_s = busy_s
    run.run()
    assert run.training.done and run.rollout.done
    in_flight, deferred, last, measured = 0, 0, -1, False
    for event, commands in run.rollout_history:
        deferred += len(event.groups) if isinstance(event, e.RolloutRequested) else 0
        measured |= isinstance(event, e.RolloutRequested) and event.iteration == 1
        in_flight -= isinstance(event, e.TurnFinished)
        for c in commands:
            if isinstance(c, e.SendTurn) and c.trajectory.sample == 0:  # with siblings, sent or held until it starts
                in_flight += 4
                deferred -= 1
                assert c.trajectory.group > last, "groups enter in submission order"
                last = c.trajectory.group
        assert in_flight < 12 + 4, "less than a group beyond what the engines run at once"
        if isinstance(event, e.TurnFinished) and deferred:
            full = 12 if measured and busy_s < 1 and budget is None else 1
            assert in_flight >= full, "a slot is empty while groups are deferred"


@settings(max_examples=40, deadline=None)
@given(st.data(), modes, st.integers(0, 200), st.integers(0, 1))
def test_a_stop_at_any_moment_ends_the_run_with_a_checkpoint_of_whole_iterations(data, mode, moment, every):
    random = choice(data)
    training = training_settings(mode=mode, checkpoint_every_iterations=every)
    made = PureJob(rollout_settings(), training, groups=6, samples=4, choose=random)
    seen = [0]

    def choose(n: int) -> int:
        seen[0] += 1
        if seen[0] == moment:
            made._to_training.append(e.StopRequested(t=made._now, reason="stop requested"))
        return random(n)

    made.choose = choose
    made.run()
    assert made.training.done and made.rollout.done
    saved = made.training_commands(e.SaveCheckpoint)
    steps = made.training_commands(e.FinishStep)
    assert saved, "a stop saves what there is"
    assert len(steps) == 3 * saved[-1].iteration, "a checkpoint holds whole iterations"


@settings(max_examples=40, deadline=None)
@given(st.data(), modes, widths)
def test_replaying_the_events_gives_the_same_commands(data, mode, width):
    run = job(choice(data), mode, width, evaluate=True)
    again = PureJob(run.rollout_settings, run.training_settings, 6, 4, lambda n: 0)
    assert [again.rollout.on(event) for event, _ in run.rollout_history] == [c for _, c in run.rollout_history]
    assert [again.training.on(event) for event, _ in run.training_history] == [c for _, c in run.training_history]

"""What must hold whichever engines are lost, whenever: during generation, updates, evaluation, their own restart."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rpipe.core import events as e
from rpipe.core.types import TrajectoryId
from tests.pure_job import PureJob, admission, rollout_settings, training_settings

modes = st.sampled_from(["serial", "fifo", "exact"])
widths = st.sampled_from([None, 1, 2])
WANTED = Counter(TrajectoryId(g, s) for g in range(12) for s in range(4))


def job(data, mode="fifo", width=2, engines=2, losses=12, **changes):
    """Two iterations of 6 x 4 trajectories, with up to `losses` engines lost at random moments."""
    random = data.draw(st.randoms(use_true_random=False))
    moments = {random.randrange(250): random.randrange(engines) for _ in range(losses)}
    settings_ = rollout_settings(
        engines=engines, admission=admission(width), evaluate=True, engine_restarts=1000, **{"max_new_tokens": 64, **changes}
    )
    return PureJob(
        settings_, training_settings(mode=mode), groups=6, samples=4, choose=random.randrange, lose=moments.get
    ).run()


@settings(max_examples=40, deadline=None)
@given(st.data(), modes, widths, st.integers(1, 3))
def test_no_trajectory_is_lost_or_doubled(data, mode, width, engines):
    run = job(data, mode, width, engines)
    answers = [x.trajectory for x, _ in run.rollout_history if isinstance(x, e.TurnFinished)]
    finished = Counter(trajectory for trajectory in answers if trajectory.group >= 0)
    scored = Counter(c.trajectory for c in run.rollout_commands(e.ScoreTrajectory) if c.trajectory.group >= 0)
    trained = Counter(
        TrajectoryId(s.group, sample)
        for c in run.training_commands(e.TrainMicroBatch)
        for s in c.slices
        for sample in s.samples
    )
    assert finished == scored == trained == WANTED
    assert Counter(c.group for c in run.rollout_commands(e.SendGroup)) == Counter(range(12))
    assert run.training.done and run.rollout.done and not run.rollout.next_deadline_t
    assert [c.version for c in run.rollout_commands(e.ConfirmWeights)] == [0, 1, 2]


@settings(max_examples=40, deadline=None)
@given(st.data(), widths, st.integers(1, 3))
def test_turns_go_only_to_engines_that_hold_the_version_and_from_the_prefix_they_had(data, width, engines):
    run = job(data, "fifo", width, engines)
    holds: dict[int, int] = {}
    prefix: Counter[TrajectoryId] = Counter()
    for event, commands in run.rollout_history:
        match event:
            case e.RolloutRequested():
                prefix.clear()  # held-out groups have the same numbers in every evaluation
            case e.EngineUpdated() | e.EngineRestarted():
                holds[event.engine] = event.version
            case e.EngineLost():
                holds.pop(event.engine, None)
                prefix.update({p.trajectory: p.output_tokens for p in event.prefixes})
        for c in commands:
            if isinstance(c, e.RestartEngine):
                holds.pop(c.engine, None)
            elif isinstance(c, e.SendTurn):
                assert holds.get(c.engine) == c.version
                assert c.prefix_tokens == prefix[c.trajectory]


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 3))
def test_weights_are_confirmed_when_every_living_engine_holds_them_and_one_lives(data, engines):
    run = job(data, engines=engines)
    updating: set[int] = set()
    alive: set[int] = set()
    for event, commands in run.rollout_history:
        if isinstance(event, e.EngineUpdated | e.EngineLost):
            updating.discard(event.engine)
        if isinstance(event, e.EngineLost):
            alive.discard(event.engine)
        elif isinstance(event, e.EngineUpdated | e.EngineRestarted):
            alive.add(event.engine)
        for c in commands:
            if isinstance(c, e.UpdateEngine):
                updating.add(c.engine)
            elif isinstance(c, e.ConfirmWeights):
                assert not updating and alive


@settings(max_examples=30, deadline=None)
@given(st.data(), modes)
def test_exact_histories_with_losses_train_as_those_without(data, mode):
    exact = job(data, "exact")
    serial = job(data, "serial", None, losses=0)
    assert exact.accumulation() == serial.accumulation()


@settings(max_examples=30, deadline=None)
@given(st.data(), modes, st.sets(st.integers(0, 11)), st.booleans())
def test_groups_that_an_interrupted_attempt_finished_are_not_generated_again(data, mode, kept, drop):
    random = data.draw(st.randoms(use_true_random=False))
    made = PureJob(
        rollout_settings(drop_zero_variance=drop), training_settings(mode=mode), groups=6, samples=4, choose=random.randrange
    )
    length = made.length
    for group in kept:  # those of odd number taught nothing
        rewards = (0.0, 0.0, 0.0, 0.0) if group % 2 else (0.0, 1.0, 0.0, 1.0)
        tokens = tuple(length(TrajectoryId(group, s)) for s in range(4))
        made.kept[group] = e.GroupSpec(group, 4, output_tokens=tokens, rewards=rewards)
    made.run()
    sent = Counter(c.trajectory for c in made.rollout_commands(e.SendTurn))
    assert sent == Counter(TrajectoryId(g, s) for g in range(12) if g not in kept for s in range(4))
    dropped = {g for g in kept if g % 2} if drop else set()
    assert Counter(g for c in made.training_commands(e.FinishStep) for g in c.groups) == Counter(set(range(12)) - dropped)
    assert {c.group for c in made.rollout_commands(e.DropGroup)} == dropped


@settings(max_examples=40, deadline=None)
@given(st.data(), widths)
def test_replaying_a_history_with_losses_gives_the_same_commands(data, width):
    run = job(data, "fifo", width)
    again = PureJob(run.rollout_settings, run.training_settings, 6, 4, lambda n: 0)
    for event, commands in run.rollout_history:
        text = msgspec.json.encode(event)
        assert again.rollout.on(msgspec.json.decode(text, type=type(event))) == commands


@settings(max_examples=40, deadline=None)
@given(st.data(), widths, st.sets(st.integers(0, 17)), st.sets(st.integers(0, 17)), st.integers(0, 3), st.integers(0, 2))
def test_with_refill_losses_and_kept_groups_the_same_groups_are_trained(data, width, kept, dull, refill, ahead):
    """Whatever happened before and happens now, the selection is by submission order alone, and so is how many are drawn: the
    next iteration gets the same prompts."""

    def run(losses: int, kept: set[int]) -> tuple[list[list[int]], dict[int, int]]:
        random = data.draw(st.randoms(use_true_random=False))
        moments = {random.randrange(250): random.randrange(2) for _ in range(losses)}
        policy = {"drop_zero_variance": True, "refill_groups": refill, "over_sampling_groups": ahead, "engine_restarts": 1000}
        made = PureJob(
            rollout_settings(admission=admission(width), **policy),
            training_settings(mode="exact"),
            groups=6,
            samples=4,
            choose=random.randrange,
            lose=moments.get,
            reward=lambda t: 1.0 if t.group in dull else float(t.sample % 2),
        )
        for group in kept:
            tokens = tuple(made.length(TrajectoryId(group, s)) for s in range(4))
            rewards = tuple(made.reward(TrajectoryId(group, s)) for s in range(4))
            made.kept[group] = e.GroupSpec(group, 4, output_tokens=tokens, rewards=rewards)
        made.run()
        assert made.training.done and made.rollout.done
        assert not {c.trajectory.group for c in made.rollout_commands(e.SendTurn)} & kept
        return [sorted(c.groups) for c in made.training_commands(e.FinishStep)], dict(made.drawn)

    assert run(12, kept) == run(0, set())

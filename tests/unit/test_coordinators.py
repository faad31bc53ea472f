"""The two coordinators, one claim a test, with events written by hand."""

from __future__ import annotations

import msgspec
import pytest

from rpipe.control.rollout import OffPolicy, RolloutCoordinator
from rpipe.control.state import IllegalTransition
from rpipe.control.training import TrainingCoordinator
from rpipe.core import events as e
from rpipe.core.types import TrajectoryId
from rpipe.policy.admission import Fifo, Frontier
from rpipe.policy.placement import GroupAffine
from tests.pure_job import PureJob, rollout_settings, step_done, training_settings


def running(groups=3, samples=2, **changes):
    """A rollout coordinator in the middle of iteration 0, and what it commanded."""
    coordinator = RolloutCoordinator(rollout_settings(**changes))
    coordinator.on(e.WeightsOffered(t=0.0, version=0))
    for engine in range(2):
        coordinator.on(e.EngineUpdated(t=0.0, engine=engine, version=0, started_t=0.0))
    specs = tuple(e.GroupSpec(g, 10) for g in range(groups))
    request = e.RolloutRequested(t=1.0, iteration=0, version=0, purpose="train", trajectories_per_group=samples, groups=specs)
    return coordinator, coordinator.on(request)


def finished(group, sample, engine=0, version=0, finish="stop", t=2.0):
    return e.TurnFinished(
        t=t, trajectory=TrajectoryId(group, sample), engine=engine, output_tokens=5, cached_tokens=0, finish=finish,
        started_t=1.0, first_token_t=1.5, version=version,
    )  # fmt: skip


def scored(group, sample, reward):
    return e.TrajectoryScored(t=3.0, trajectory=TrajectoryId(group, sample), reward=reward, started_t=2.0)


def test_no_rollout_is_asked_for_before_every_engine_holds_the_weights():
    coordinator = RolloutCoordinator(rollout_settings())
    coordinator.on(e.WeightsOffered(t=0.0, version=0))
    assert coordinator.on(e.EngineUpdated(t=0.0, engine=1, version=0, started_t=0.0)) == []
    last = coordinator.on(e.EngineUpdated(t=0.0, engine=0, version=0, started_t=0.0))
    assert last == [e.ConfirmWeights(version=0), e.RequestRollout(iteration=0, version=0, purpose="train")]


def test_frontier_groups_go_first_spread_over_engines_with_priority_by_submission_order():
    _, commands = running(admission=Frontier(2))
    assert [(c.trajectory.group, c.engine, c.priority) for c in commands] == [(0, 0, 0), (0, 1, 0), (1, 0, -1), (1, 1, -1)]


def test_a_group_that_is_serving_complete_makes_room_before_its_rewards_are_known():
    coordinator, _ = running(admission=Frontier(2))
    coordinator.on(finished(0, 0))
    commands = coordinator.on(finished(0, 1, engine=1))
    assert commands[:2] == [e.ScoreTrajectory(trajectory=TrajectoryId(0, 1)), e.ServingComplete(group=0)]
    assert [c.trajectory.group for c in commands[2:]] == [2, 2]


def test_a_group_is_sent_only_when_all_its_rewards_are_in():
    coordinator, _ = running(admission=Fifo())
    coordinator.on(finished(1, 0))
    coordinator.on(finished(1, 1))
    assert coordinator.on(scored(1, 0, 1.0)) == []
    (sent,) = coordinator.on(scored(1, 1, 0.0))
    assert isinstance(sent, e.SendGroup) and sent.order == 1 and sent.rewards == (1.0, 0.0)
    assert sent.advantages[0] == -sent.advantages[1] > 0


def test_tokens_of_another_version_are_refused():
    coordinator, _ = running()
    with pytest.raises(OffPolicy, match="sampled under version 3"):
        coordinator.on(finished(0, 0, version=3))


def test_an_answer_that_comes_twice_is_caught():
    coordinator, _ = running()
    coordinator.on(finished(0, 0))
    with pytest.raises(IllegalTransition, match=r"trajectory 0\.0: generated cannot become generated"):
        coordinator.on(finished(0, 0))


def test_a_deadline_cuts_what_ran_too_long_once_and_scores_what_it_has():
    coordinator, _ = running(admission=Fifo(), trajectory_deadline_s=10.0)
    assert coordinator.next_deadline_t is None, "what waits in an engine's queue has not begun"
    for t, trajectory in [(1.0, TrajectoryId(0, 0)), (1.0, TrajectoryId(0, 1)), (3.0, TrajectoryId(2, 0))]:
        coordinator.on(e.TurnStarted(t=t, trajectory=trajectory, engine=0))
    assert coordinator.next_deadline_t == 11.0
    coordinator.on(finished(0, 0))
    assert coordinator.on(e.DeadlinePassed(t=11.5)) == [e.AbortTurn(trajectory=TrajectoryId(0, 1), engine=1)]
    assert coordinator.on(e.DeadlinePassed(t=12.0)) == [] and coordinator.next_deadline_t == 13.0
    commands = coordinator.on(finished(0, 1, finish="abort"))
    assert commands[0] == e.ScoreTrajectory(trajectory=TrajectoryId(0, 1))


def test_a_full_queue_to_the_trainer_holds_new_groups_back():
    coordinator, _ = running(admission=Frontier(1), queue_bytes=0)
    coordinator.on(finished(0, 0))
    after = coordinator.on(finished(0, 1))
    assert any(isinstance(c, e.SendTurn) and c.trajectory.group == 1 for c in after)
    coordinator.on(scored(0, 0, 1.0))
    coordinator.on(scored(0, 1, 0.0))  # group 0 is on its way
    coordinator.on(finished(1, 0))
    held = coordinator.on(finished(1, 1))
    assert not any(isinstance(c, e.SendTurn) for c in held)
    assert [c.trajectory.group for c in coordinator.on(e.GroupReceived(t=4.0, group=0))] == [2, 2]


LEAD, SIBLING = TrajectoryId(0, 0), TrajectoryId(0, 1)


def test_siblings_on_one_engine_follow_when_their_lead_has_started():
    """They find the prompt in the prefix cache; until then they count as being in flight."""
    coordinator, commands = running(groups=2, admission=Frontier(1), placement=GroupAffine())
    assert [c.trajectory for c in commands] == [LEAD] and coordinator.turns.in_flight[0] == 2
    (followed,) = coordinator.on(e.TurnStarted(t=1.5, trajectory=LEAD, engine=0))
    assert isinstance(followed, e.SendTurn) and followed.trajectory == SIBLING and followed.engine == 0


def test_siblings_follow_a_lead_that_ends_before_it_was_seen_to_start():
    coordinator, _ = running(groups=2, admission=Frontier(1), placement=GroupAffine())
    commands = coordinator.on(finished(0, 0))
    assert [c.trajectory for c in commands if isinstance(c, e.SendTurn)] == [SIBLING]


def test_siblings_of_a_lead_whose_engine_is_lost_go_elsewhere_with_it():
    coordinator, _ = running(groups=1, admission=Frontier(1), placement=GroupAffine())
    commands = coordinator.on(e.EngineLost(t=2.0, engine=0, reason="silent"))
    assert [(c.trajectory, c.engine) for c in commands if isinstance(c, e.SendTurn)] == [(LEAD, 1), (SIBLING, 1)]
    assert coordinator.on(e.TurnStarted(t=2.5, trajectory=LEAD, engine=1)) == []


def test_fifo_sends_every_sibling_at_once():
    """Held back, they would come behind younger groups in the engines' queues."""
    _, commands = running(groups=2, admission=Fifo(), placement=GroupAffine())
    assert len(commands) == 4


def test_an_evaluation_comes_before_the_first_iteration_and_after_the_last():
    job = PureJob(rollout_settings(evaluate=True), training_settings(), groups=4, samples=4, choose=lambda n: 0).run()
    asked = [(c.purpose, c.version) for c in job.rollout_commands(e.RequestRollout)]
    assert asked == [("eval", 0), ("train", 0), ("train", 1), ("eval", 2)]
    assert len(job.rollout_commands(e.EndEvaluation)) == 2


def arrived(group, tokens=(10, 10), iteration=0, version=0):
    return e.GroupArrived(t=1.0, group=group, order=group, iteration=iteration, version=version, tokens=tokens, nbytes=1)


def ready(**changes):
    coordinator = TrainingCoordinator(training_settings(**changes))
    coordinator.on(e.TrainerReady(t=0.0, iteration=0, version=0, replicas=coordinator.settings.replicas))
    coordinator.on(e.WeightsPublished(t=0.0, version=0, started_t=0.0, nbytes=1))
    return coordinator


def test_fifo_trains_the_first_group_to_arrive():
    commands = ready(mode="fifo").on(arrived(5))
    assert isinstance(commands[0], e.BeginStep)
    assert [c.slices for c in commands[1:]] == [(e.Slice(5, (0,)),), (e.Slice(5, (1,)),)]


def test_exact_waits_for_the_next_in_submission_order():
    coordinator = ready(mode="exact")
    assert coordinator.on(arrived(1)) == []
    assert coordinator.waiting_for() == "group 0 of iteration 0"
    groups = [s.group for c in coordinator.on(arrived(0)) if isinstance(c, e.TrainMicroBatch) for s in c.slices]
    assert groups == [0, 0, 1, 1]


def test_exact_does_not_wait_for_a_dropped_group():
    coordinator = ready(mode="exact")
    coordinator.on(arrived(1))
    commands = coordinator.on(e.GroupDropped(t=1.0, group=0, order=0, iteration=0))
    assert any(isinstance(c, e.TrainMicroBatch) for c in commands)


def test_serial_trains_nothing_before_the_rollout_ended():
    coordinator = ready(mode="serial")
    assert coordinator.on(arrived(0)) == coordinator.on(arrived(1)) == []
    ended = e.RolloutEnded(t=2.0, iteration=0, version=0, groups_sent=2, groups_dropped=0)
    assert any(isinstance(c, e.TrainMicroBatch) for c in coordinator.on(ended))


def test_global_packing_lets_a_micro_batch_span_groups():
    coordinator = ready(mode="serial", span_groups=True, replicas=1)
    coordinator.on(arrived(0))
    coordinator.on(arrived(1))
    ended = coordinator.on(e.RolloutEnded(t=2.0, iteration=0, version=0, groups_sent=2, groups_dropped=0))
    (batch,) = [c for c in ended if isinstance(c, e.TrainMicroBatch)]
    assert batch.slices == (e.Slice(0, (0, 1)), e.Slice(1, (0, 1)))


def test_what_completes_while_replicas_work_shares_their_next_micro_batch():
    coordinator = ready(mode="fifo", span_groups=True, groups_per_step=3)
    first = [c for c in coordinator.on(arrived(0)) if isinstance(c, e.TrainMicroBatch)]
    assert [(c.replica, c.slices) for c in first] == [(0, (e.Slice(0, (0,)),)), (1, (e.Slice(0, (1,)),))]
    assert coordinator.on(arrived(1)) == coordinator.on(arrived(2)) == []
    done = e.MicroBatchDone(t=1.0, replica=1, micro_batch=1, started_t=0.0, ended_t=1.0, trajectories=1, tokens=10)
    (next_one,) = coordinator.on(done)
    assert (next_one.replica, next_one.slices) == (1, (e.Slice(1, (0, 1)), e.Slice(2, (0, 1))))


def test_a_pipeline_gets_what_is_ready_in_one_call_cut_so_that_it_fills():
    coordinator = ready(mode="fifo", span_groups=True, groups_per_step=3, replicas=1, pipeline_stages=2)
    (call,) = [c for c in coordinator.on(arrived(0, tokens=(10, 10, 10, 10))) if isinstance(c, e.TrainMicroBatch)]
    assert call.cuts == (1, 1, 1, 1) and call.tokens == 40
    coordinator.on(arrived(1, tokens=(90, 90)))
    coordinator.on(arrived(2, tokens=(50, 50)))
    done = e.MicroBatchDone(t=1.0, replica=0, micro_batch=0, started_t=0.0, ended_t=1.0, trajectories=4, tokens=40)
    (call,) = [c for c in coordinator.on(done) if isinstance(c, e.TrainMicroBatch)]
    assert call.slices == (e.Slice(1, (0, 1)), e.Slice(2, (0, 1))) and call.cuts == (1, 1, 1, 1), "coalesced"


def calls_of(commands):
    return [c for c in commands if isinstance(c, e.TrainMicroBatch)]


@pytest.mark.parametrize("mode", ["exact", "fifo"])
def test_a_pipeline_that_is_fed_group_by_group_gets_each_cut_so_that_it_fills(mode):
    coordinator = ready(mode=mode, groups_per_step=3, replicas=1, pipeline_stages=2)
    (first,) = calls_of(coordinator.on(arrived(0, tokens=(10, 10, 10, 10))))
    assert first.cuts == (1, 1, 1, 1), "of 100 tokens one micro-batch would hold them all, and one stage would idle"
    (second,) = calls_of(coordinator.on(arrived(1, tokens=(10, 90, 20, 30))))
    assert second.cuts == (1, 1, 2), "no finer than the longest"


def test_a_serial_pipeline_runs_small_groups_in_one_call_cut_as_exact_cuts_them():
    coordinator = ready(mode="serial", replicas=1, pipeline_stages=2)
    coordinator.on(arrived(0))
    coordinator.on(arrived(1))
    (call,) = calls_of(coordinator.on(e.RolloutEnded(t=2.0, iteration=0, version=0, groups_sent=2, groups_dropped=0)))
    assert call.slices == (e.Slice(0, (0, 1)), e.Slice(1, (0, 1))) and call.cuts == (1, 1, 1, 1)


def test_two_pipelines_deal_a_group_between_them():
    coordinator = ready(mode="fifo", pipeline_stages=2)
    found = calls_of(coordinator.on(arrived(0, tokens=(10,) * 6)))
    assert [(c.replica, c.slices, c.cuts) for c in found] == [
        (0, (e.Slice(0, (0, 2, 4)),), (1, 1, 1)),
        (1, (e.Slice(0, (1, 3, 5)),), (1, 1, 1)),
    ]


@pytest.mark.parametrize("span", [False, True])
def test_no_peer_gets_more_of_a_micro_batch_than_was_planned(span):
    coordinator = ready(mode="fifo", span_groups=span, groups_per_step=1, replicas=1, micro_batch_tokens=16_384, peers=8)
    found = calls_of(coordinator.on(arrived(0, tokens=(14_000,) * 9)))
    assert [len(c.slices[0].samples) for c in found] == [8, 1], "one peer would get two of nine"


def test_a_pulling_replica_holds_at_most_two_micro_batches():
    coordinator = ready(mode="fifo", replicas=1, micro_batch_tokens=10)
    first = coordinator.on(arrived(0, tokens=(10, 10, 10, 10)))
    assert sum(isinstance(c, e.TrainMicroBatch) for c in first) == 2
    done = e.MicroBatchDone(t=1.0, replica=0, micro_batch=0, started_t=0.0, ended_t=1.0, trajectories=1, tokens=10)
    assert sum(isinstance(c, e.TrainMicroBatch) for c in coordinator.on(done)) == 1


def test_a_group_of_an_older_version_is_refused():
    with pytest.raises(OffPolicy, match="sampled under version 7"):
        ready().on(arrived(0, version=7))


def test_training_stops_after_so_many_skipped_steps_in_a_row():
    coordinator = ready(mode="fifo", replicas=1, groups_per_step=1, stop_after_skipped_steps=2)
    stopped = []
    for step in range(2):
        coordinator.on(arrived(step, tokens=(10,)))
        done = e.MicroBatchDone(t=1.0, replica=0, micro_batch=step, started_t=0.0, ended_t=1.0, trajectories=1, tokens=10)
        coordinator.on(done)
        stopped = coordinator.on(step_done(2.0, step, skipped=True))
    assert stopped == [e.StopTraining(reason="gradients were not finite in 2 steps in a row, the last is step 1")]
    assert coordinator.done


def test_checkpoints_fall_every_n_iterations_and_at_the_end():
    settings = training_settings(iterations=5, checkpoint_every_iterations=2)
    job = PureJob(rollout_settings(iterations=5), settings, groups=2, samples=2, choose=lambda n: 0).run()
    assert [c.iteration for c in job.training_commands(e.SaveCheckpoint)] == [2, 4, 5]


def test_a_stop_while_weights_are_published_saves_once():
    coordinator = TrainingCoordinator(training_settings())
    coordinator.on(e.TrainerReady(t=0.0, iteration=0, version=0, replicas=2))
    stopped = coordinator.on(e.StopRequested(t=0.5, reason="stop requested"))
    assert stopped == [e.SaveCheckpoint(iteration=0, version=0)]
    assert coordinator.on(e.WeightsPublished(t=1.0, version=0, started_t=0.0, nbytes=1)) == []
    saved = e.CheckpointSaved(t=2.0, iteration=0, started_t=1.0, path="")
    assert coordinator.on(saved) == [e.StopTraining(reason="stop requested")]


def test_a_stop_during_the_last_save_is_a_normal_end():
    coordinator = TrainingCoordinator(training_settings(iterations=3))
    coordinator.on(e.TrainerReady(t=0.0, iteration=2, version=2, replicas=2))
    coordinator.iteration = coordinator.version = 3
    published = e.WeightsPublished(t=1.0, version=3, started_t=0.0, nbytes=1)
    assert coordinator.on(published) == [e.SaveCheckpoint(iteration=3, version=3)]
    assert coordinator.on(e.StopRequested(t=1.5, reason="stop requested")) == []
    assert coordinator.on(e.CheckpointSaved(t=2.0, iteration=3, started_t=1.0, path="")) == [e.StopTraining(reason="")]


def test_a_checkpoint_beyond_the_wanted_iterations_ends_at_once():
    training = TrainingCoordinator(training_settings(iterations=2))
    training.on(e.TrainerReady(t=0.0, iteration=3, version=3, replicas=2))
    published = e.WeightsPublished(t=1.0, version=3, started_t=0.0, nbytes=1)
    assert training.on(published) == [e.StopTraining(reason="")]
    rollout = RolloutCoordinator(rollout_settings(iterations=2, engines=1))
    rollout.on(e.WeightsOffered(t=0.0, version=3))
    assert rollout.on(e.EngineUpdated(t=0.0, engine=0, version=3, started_t=0.0))[-1] == e.FinishRun()


def test_events_cannot_be_changed():
    with pytest.raises(AttributeError):
        finished(0, 0).t = 1.0  # type: ignore[misc]
    assert msgspec.structs.replace(finished(0, 0), t=9.0).t == 9.0

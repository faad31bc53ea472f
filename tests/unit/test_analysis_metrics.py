"""Figures of hand-made logs whose times are simple enough to add up by hand."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from rpipe.analysis.run import RunError
from rpipe.analysis.summary import nearest_rank, report, summarize
from rpipe.analysis.timeline import Bar, timeline
from rpipe.core.eventlog import EventLog
from rpipe.core.events import (
    BeginStep,
    CheckpointSaved,
    DropGroup,
    EndEvaluation,
    EndRollout,
    Finish,
    FinishStep,
    GroupSpec,
    MicroBatchDone,
    Purpose,
    RolloutRequested,
    SendGroup,
    Slice,
    StepDone,
    ToolFinished,
    TrainerReady,
    TrainMicroBatch,
    TrajectoryScored,
    TurnFinished,
    WeightsPublished,
)
from rpipe.core.types import TrajectoryId

JSON_KEYS = [
    "iteration", "rollout_s", "train_busy_s", "rollout_to_train_end_s", "first_dispatch_s", "waiting_ratio_start",
    "waiting_ratio_busy", "pipeline_bubble", "steps", "groups_trained", "groups_dropped", "trajectories",
    "generated_tokens", "reward_mean", "logprob_gap_mean", "logprob_gap_max",
]  # fmt: skip


def logs(attempt: Path) -> tuple[EventLog, EventLog]:
    """The rollout coordinator's file and the training coordinator's."""
    return EventLog(attempt / "events", 0), EventLog(attempt / "events", 1)


def request(log: EventLog, t: float, iteration: int, groups: list[int], k: int = 2, purpose: Purpose = "train") -> None:
    specs = tuple(GroupSpec(group, 5) for group in groups)
    log.event(
        RolloutRequested(t=t, iteration=iteration, version=iteration, purpose=purpose, trajectories_per_group=k, groups=specs)
    )


def turn(
    log: EventLog, t: float, group: int, sample: int, tokens: int, started_t: float, finish: Finish = "stop", engine: int = 0
) -> None:
    log.event(
        TurnFinished(
            t=t,
            trajectory=TrajectoryId(group, sample),
            engine=engine,
            output_tokens=tokens,
            cached_tokens=0,
            finish=finish,
            started_t=started_t,
            first_token_t=started_t + 0.5,
            version=0,
        )
    )


def send(log: EventLog, t: float, iteration: int, group: int, order: int, rewards: tuple[float, ...]) -> None:
    log.command(
        t, SendGroup(group=group, order=order, iteration=iteration, version=iteration, rewards=rewards, advantages=rewards)
    )


def micro_batch(log: EventLog, t: float, number: int, replica: int, step: int, groups: list[int]) -> None:
    slices = tuple(Slice(group, (0, 1)) for group in groups)
    log.command(t, TrainMicroBatch(micro_batch=number, replica=replica, step=step, slices=slices, tokens=10))


def trained(log: EventLog, started_t: float, ended_t: float, number: int, replica: int, t: float | None = None) -> None:
    log.event(
        MicroBatchDone(
            t=t or ended_t, replica=replica, micro_batch=number, started_t=started_t, ended_t=ended_t, trajectories=2, tokens=10
        )
    )


def step_done(log: EventLog, started_t: float, t: float, step: int, gap: float = 0.0, skipped: bool = False) -> None:
    log.event(
        StepDone(
            t=t,
            step=step,
            started_t=started_t,
            skipped=skipped,
            loss=0.5,
            grad_norm=1.0,
            learning_rate=1e-4,
            entropy=1.0,
            clip_fraction=0.0,
            kl=0.0,
            logprob_gap_mean=gap,
            logprob_gap_max=2 * gap,
            trained_tokens=20,
        )
    )


def serial_iteration(rollout: EventLog, training: EventLog, t: float, iteration: int = 0, first_step: int = 0) -> None:
    """Two groups of two, 10 s of rollout, then two steps of one group: 4 s + 1 s, and 2 s + 1 s."""
    a, b = 2 * iteration, 2 * iteration + 1
    request(rollout, t, iteration, [a, b])
    for group, end in ((a, t + 4), (b, t + 9)):
        turn(rollout, end - 1, group, 0, 30, t)
        turn(rollout, end, group, 1, 50, t, finish="length")
        send(rollout, end + 1, iteration, group, group - a, (1.0, 0.0))
    rollout.command(t + 10, EndRollout(iteration=iteration, version=iteration, groups_sent=2, groups_dropped=0))
    for step, (group, start, busy) in enumerate(((a, t + 10, 4.0), (b, t + 15, 2.0)), first_step):
        training.command(start, BeginStep(step=step, iteration=iteration))
        micro_batch(training, start, step, 0, step, [group])
        trained(training, start, start + busy, step, 0)
        training.command(start + busy, FinishStep(step=step, iteration=iteration, groups=(group,)))
        step_done(training, start + busy, start + busy + 1, step, gap=1e-6 * (1 + step))


def test_a_serial_iteration_has_the_figures_one_adds_up_by_hand(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        training.note(2.9, "WarmedUp", steps=3, loss=1.0, started_t=2.4)
        training.event(TrainerReady(t=3.0, iteration=0, version=0, replicas=1))
        serial_iteration(rollout, training, 100.0)
        training.event(WeightsPublished(t=119.5, version=1, started_t=119.0, nbytes=8))
    told = report(tmp_path, "hand")
    [row] = told["iterations"]
    assert list(row) == JSON_KEYS
    assert row == {
        "iteration": 0,
        "rollout_s": 10.0,
        "train_busy_s": 8.0,  # 4 + 2 of micro-batches, 1 + 1 of steps
        "rollout_to_train_end_s": 18.0,
        "first_dispatch_s": 10.0,
        "waiting_ratio_start": 10 / 18,
        "waiting_ratio_busy": 1 - 8 / 18,
        "pipeline_bubble": 0.0,
        "steps": 2,
        "groups_trained": 2,
        "groups_dropped": 0,
        "trajectories": 4,
        "generated_tokens": 160,
        "reward_mean": 0.5,
        "logprob_gap_mean": 1e-6,  # the first step's; on the second the weights have moved
        "logprob_gap_max": 2e-6,
    }
    assert told["evaluations"] == [] and told["attempts"] == 1
    run = told["run"]
    assert run["tokens_per_s"] == 16.0 and run["truncation_rate"] == 0.5
    assert (run["response_tokens_p50"], run["response_tokens_p95"]) == (30, 50)
    assert run["publish_s"] == 0.5 and run["seconds"] == 119.5
    parts = {"starting": 2.5, "warming up": 0.5, "rollout": 10.0, "training after rollout": 8.0, "publishing": 0.5}
    assert run["time_s"] == pytest.approx({**parts, "evaluating": 0, "saving": 0, "other": 98.0})


def streamed_iteration(rollout: EventLog, training: EventLog) -> None:
    """Four groups, one of them dropped; U = 2; two replicas pull micro-batches while the rollout runs from 0 s to 20 s."""
    request(rollout, 0.0, 0, [0, 1, 2, 3])
    for group, end in ((1, 4.0), (0, 6.0), (3, 10.0), (2, 19.0)):
        for sample in (0, 1):
            turn(rollout, end - sample, group, sample, 10, 0.0)
    send(rollout, 5.0, 0, 1, 1, (1.0, 0.0))
    send(rollout, 7.0, 0, 0, 0, (1.0, 1.0))
    rollout.command(11.0, DropGroup(group=3, order=3, iteration=0, rewards=(0.0, 0.0), reason="zero variance"))
    send(rollout, 20.0, 0, 2, 2, (0.0, 1.0))
    rollout.command(20.0, EndRollout(iteration=0, version=0, groups_sent=3, groups_dropped=1))
    training.command(5.0, BeginStep(step=0, iteration=0))
    micro_batch(training, 5.0, 0, 0, 0, [1])
    micro_batch(training, 5.0, 1, 1, 0, [1])
    trained(training, 5.5, 6.5, 0, 0)
    trained(training, 5.25, 8.25, 1, 1, t=9.0)  # its coordinator heard of it late, being busy itself
    micro_batch(training, 8.0, 2, 0, 0, [0])  # group 0 arrived at 7; a replica was free for it at 8
    trained(training, 8.0, 10.0, 2, 0)
    training.command(10.0, FinishStep(step=0, iteration=0, groups=(1, 0)))
    step_done(training, 10.0, 11.0, 0, gap=2e-6)
    training.command(20.5, BeginStep(step=1, iteration=0))
    micro_batch(training, 20.5, 3, 1, 1, [2])
    trained(training, 20.5, 22.5, 3, 1)
    training.command(22.5, FinishStep(step=1, iteration=0, groups=(2,)))
    step_done(training, 22.5, 23.0, 1, skipped=True)


def test_a_streamed_iteration_on_two_replicas_with_a_dropped_group(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        training.event(TrainerReady(t=0.0, iteration=0, version=0, replicas=2))
        streamed_iteration(rollout, training)
    told = report(tmp_path, "hand")
    [row] = told["iterations"]
    assert row["rollout_s"] == 20.0 and row["rollout_to_train_end_s"] == 23.0
    assert row["train_busy_s"] == (1 + 3 + 2 + 2) / 2 + 1.5  # the mean over two replicas, then the steps
    assert row["first_dispatch_s"] == 8.0  # both groups of the first step have left the FIFO
    assert row["waiting_ratio_start"] == 5.25 / 23 and row["waiting_ratio_busy"] == 1 - 5.5 / 23
    assert (row["steps"], row["groups_trained"], row["groups_dropped"], row["trajectories"]) == (2, 3, 1, 8)
    assert row["generated_tokens"] == 80 and row["reward_mean"] == 0.5
    assert row["logprob_gap_mean"] == 2e-6
    assert told["run"]["skipped_steps"] == 1 and told["run"]["time_s"]["training after rollout"] == 3.0
    assert any("1 step skipped in iteration 0" in problem for problem in told["run"]["problems"])


def test_a_clock_that_starts_at_zero_is_not_mistaken_for_no_time(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        serial_iteration(rollout, training, -10.0)  # the first micro-batch starts at exactly 0
    [row] = report(tmp_path, "hand")["iterations"]
    assert row["waiting_ratio_start"] == 10 / 18


def test_evaluation_turns_count_neither_as_tokens_nor_as_trajectories(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        request(rollout, 1.0, 0, [-1], k=1, purpose="eval")
        turn(rollout, 2.0, -1, 0, 1000, 1.0)
        rollout.command(3.0, EndEvaluation(iteration=0, version=0, count=1, reward_mean=0.25))
        serial_iteration(rollout, training, 10.0)
        request(rollout, 30.0, 1, [-1], k=1, purpose="eval")
        turn(rollout, 31.0, -1, 0, 1000, 30.0)
        rollout.command(34.0, EndEvaluation(iteration=1, version=1, count=1, reward_mean=0.75))
    told = report(tmp_path, "hand")
    assert told["evaluations"] == [
        {"iteration": 0, "reward_mean": 0.25, "count": 1},
        {"iteration": 1, "reward_mean": 0.75, "count": 1},
    ]
    assert told["iterations"][0]["generated_tokens"] == 160 and told["iterations"][0]["trajectories"] == 4
    assert told["run"]["time_s"]["evaluating"] == 6.0


def test_an_iteration_interrupted_and_trained_again_counts_once_and_the_later_one_wins(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        serial_iteration(rollout, training, 0.0)
        rollout.command(0.0, EndEvaluation(iteration=0, version=0, count=4, reward_mean=0.1))
        serial_iteration(rollout, training, 20.0, iteration=1, first_step=2)
        request(rollout, 40.0, 2, [4, 5])
        turn(rollout, 45.0, 4, 0, 99, 40.0)  # and the job is killed here
    rollout, training = logs(tmp_path / "attempt-2")
    with rollout, training:
        rollout.note(0.0, "JobStarted", unix_s=1.0, attempt=2)
        request(rollout, 5.0, 1, [2, 3])
        for group in (2, 3):
            send(rollout, 6.0, 1, group, group - 2, (1.0, 1.0))
        rollout.command(6.0, EndRollout(iteration=1, version=1, groups_sent=2, groups_dropped=0))
        training.command(6.0, BeginStep(step=1, iteration=1))
        micro_batch(training, 6.0, 0, 0, 1, [2, 3])
        trained(training, 6.0, 7.0, 0, 0)
        training.command(7.0, FinishStep(step=1, iteration=1, groups=(2, 3)))
        step_done(training, 7.0, 8.0, 1)
        request(rollout, 9.0, 2, [4, 5])
        rollout.note(10.0, "JobEnded", reason="rank 1 was lost")
    told = report(tmp_path, "hand")
    assert told["attempts"] == 2
    assert [row["iteration"] for row in told["iterations"]] == [0, 1]
    assert told["iterations"][1]["rollout_to_train_end_s"] == 3.0 and told["iterations"][1]["reward_mean"] == 1.0
    run = told["run"]
    assert run["incomplete_iterations"] == 1 and run["seconds"] == 45.0 + 10.0
    assert run["problems"] == [
        "every reward of iteration 1 was the same (1): nothing to learn from",
        "25% of responses were cut before they ended: raise rollout.max_new_tokens or the deadline",
        "attempt 2 ended: rank 1 was lost",
        "attempt 1 was killed: its log stops without a JobEnded",
        "not complete, and left out of every figure: iteration 2",
    ]


def test_what_an_interrupted_attempt_had_finished_counts_as_cut_and_with_its_turns(tmp_path: Path):
    """Two groups of two. One comes finished, both responses cut, after three turns and one; the other is generated."""
    rollout, training = logs(tmp_path / "attempt-1")
    left = GroupSpec(0, 5, output_tokens=(40, 60), rewards=(1.0, 0.0), finishes=("length", "deadline"), turns=(3, 1))
    asked = {"iteration": 0, "version": 0, "trajectories_per_group": 2, "groups": (left, GroupSpec(1, 5))}
    with rollout, training:
        rollout.event(RolloutRequested(t=0.0, purpose="train", **asked))
        send(rollout, 0.0, 0, 0, 0, (1.0, 0.0))
        turn(rollout, 4.0, 1, 0, 10, 0.0)
        turn(rollout, 5.0, 1, 1, 10, 0.0)
        answer = {"observation_tokens": 2, "done": False, "started_t": 4.0}
        rollout.event(ToolFinished(t=6.0, trajectory=TrajectoryId(1, 0), turn=0, **answer))
        turn(rollout, 7.0, 1, 0, 20, 6.0)
        send(rollout, 8.0, 0, 1, 1, (1.0, 0.0))
        rollout.command(8.0, EndRollout(iteration=0, version=0, groups_sent=2, groups_dropped=0))
        training.command(8.0, BeginStep(step=0, iteration=0))
        micro_batch(training, 8.0, 0, 0, 0, [0, 1])
        trained(training, 8.0, 9.0, 0, 0)
        training.command(9.0, FinishStep(step=0, iteration=0, groups=(0, 1)))
        step_done(training, 9.0, 10.0, 0)
    told = report(tmp_path, "hand")
    assert told["iterations"][0]["generated_tokens"] == 40, "those of this attempt"
    assert (told["run"]["truncation_rate"], told["run"]["tools"]["turns_mean"]) == (2 / 4, (3 + 1 + 2 + 1) / 4)
    assert any(problem.startswith("50% of responses were cut") for problem in told["run"]["problems"])
    text = rollout.path.read_text()
    older = text.replace(',"finishes":["length","deadline"],"turns":[3,1]', "").replace(',"finishes":[],"turns":[]', "")
    assert text != older and "finishes" not in older
    rollout.path.write_text(older)
    run = report(tmp_path, "hand")["run"]
    assert (run["truncation_rate"], run["tools"]["turns_mean"]) == (0.0, 3 / 4), "a log that does not tell is read as it was"


def test_a_later_attempt_that_did_not_complete_an_iteration_does_not_hide_the_earlier_one(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        serial_iteration(rollout, training, 0.0)
    rollout, training = logs(tmp_path / "attempt-2")
    with rollout, training:
        request(rollout, 5.0, 0, [0, 1])
    told = report(tmp_path, "hand")
    assert [row["rollout_s"] for row in told["iterations"]] == [10.0]
    assert told["run"]["incomplete_iterations"] == 0


@pytest.mark.parametrize("missing", ["StepDone", "EndRollout", "SendGroup"])
def test_an_iteration_is_complete_only_when_rollout_and_last_step_are(tmp_path: Path, missing: str):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        serial_iteration(rollout, training, 0.0)
    for log in (rollout, training):
        lines = log.path.read_text().splitlines(keepends=True)
        found = [i for i, line in enumerate(lines) if f'"kind":"{missing}"' in line]
        if missing == "SendGroup" and found:  # the job died before the second group was trained
            lines = [line for line in lines if '"EndRollout"' not in line]
        elif found:
            del lines[found[-1]]
        log.path.write_text("".join(lines))
    assert summarize(tmp_path).iterations == [] and summarize(tmp_path).interrupted == [0]


def test_an_iteration_whose_every_group_was_dropped_has_no_training_figures(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        request(rollout, 0.0, 0, [0])
        rollout.command(4.0, DropGroup(group=0, order=0, iteration=0, rewards=(0.0, 0.0), reason="zero variance"))
        rollout.command(4.0, EndRollout(iteration=0, version=0, groups_sent=0, groups_dropped=1))
    told = report(tmp_path, "hand")
    [row] = told["iterations"]
    assert row["rollout_s"] == 4.0 and row["train_busy_s"] == 0.0 and row["steps"] == 0
    nothing = ("rollout_to_train_end_s", "first_dispatch_s", "waiting_ratio_start", "waiting_ratio_busy", "logprob_gap_mean")
    assert all(row[key] is None for key in nothing)
    assert "the filter dropped every group of iteration 0: no step was made" in told["run"]["problems"]


def test_a_torn_last_line_is_passed_over(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        serial_iteration(rollout, training, 0.0)
    with training.path.open("ab") as file:
        file.write(b'{"v":1,"t":18.5,"rank":1,"se')
    assert len(report(tmp_path, "hand")["iterations"]) == 1


def test_a_damaged_line_is_named(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        serial_iteration(rollout, training, 0.0)
    lines = rollout.path.read_bytes().splitlines(keepends=True)
    lines[2] = b'{"v":1,"t":\n'
    rollout.path.write_bytes(b"".join(lines))
    with pytest.raises(RunError, match=r"rank00000\.jsonl:3: not a record"):
        report(tmp_path, "hand")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"v":99}', r"rank00000\.jsonl:1: format 99, written by a newer rpipe"),
        ("17", r"rank00000\.jsonl:1: not a record"),
        ('{"a":1}', r"rank00000\.jsonl:1: not a record"),
        ('{"v":1,"t":1.0,"rank":0,"seq":4,"io":"event","kind":"TurnFinished"}', "seq 4: TurnFinished lacks 'trajectory'"),
        ('{"v":1,"rank":0,"seq":4,"io":"event"}', "rank 0, seq 4: a record lacks 't'"),
    ],
)
def test_what_is_no_record_of_ours_is_refused_in_one_line(tmp_path: Path, line: str, message: str):
    events = tmp_path / "attempt-1" / "events"
    events.mkdir(parents=True)
    (events / "rank00000.jsonl").write_text(line + "\n")
    with pytest.raises(RunError, match=message) as caught:
        report(tmp_path, "hand")
    assert "\n" not in str(caught.value)


def test_kinds_from_a_later_version_are_passed_over(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        serial_iteration(rollout, training, 0.0)
        rollout.note(19.0, "SomethingNew", colour="green")
    assert len(report(tmp_path, "hand")["iterations"]) == 1


def test_warm_up_steps_belong_to_no_iteration(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        micro_batch(training, 1.0, 7, 0, 0, [])
        trained(training, 1.0, 2.0, 7, 0)
        step_done(training, 2.0, 3.0, 0)
        serial_iteration(rollout, training, 10.0)
    [row] = report(tmp_path, "hand")["iterations"]
    assert row["steps"] == 2 and row["train_busy_s"] == 8.0


def test_reward_functions_that_failed_are_counted_with_the_first_ones_words(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        request(rollout, 0.0, 0, [0, 1])
        for sample in (0, 1):
            error = f"no answer in 10 s ({sample})"
            rollout.event(TrajectoryScored(t=1.0, trajectory=TrajectoryId(0, sample), reward=0.0, started_t=0.5, error=error))
        for group in (0, 1):
            send(rollout, 2.0, 0, group, group, (float(group), float(group)))
        rollout.command(2.0, EndRollout(iteration=0, version=0, groups_sent=2, groups_dropped=0))
        training.command(2.0, BeginStep(step=0, iteration=0))
        training.command(2.0, FinishStep(step=0, iteration=0, groups=(0, 1)))
        step_done(training, 2.0, 3.0, 0)
        training.event(CheckpointSaved(t=5.0, iteration=1, started_t=3.0, path="x"))
    run = report(tmp_path, "hand")["run"]
    assert run["problems"] == [
        "no group of iteration 0 had two different rewards: every advantage is 0, nothing to learn from",
        "2 of 4 rewards could not be computed and count as 0; the first, in iteration 0: no answer in 10 s (0)",
    ]
    assert run["checkpoint_s"] == 2.0


def test_a_directory_that_is_no_run_and_a_run_without_events_are_told_apart(tmp_path: Path):
    with pytest.raises(RunError, match="no such directory"):
        report(tmp_path / "nowhere", "x")
    with pytest.raises(RunError, match="not a run dir"):
        report(tmp_path, "x")
    log = EventLog(tmp_path / "attempt-1" / "events", 0)
    with log:
        log.note(0.0, "JobStarted", unix_s=1.0, attempt=1)
    with pytest.raises(RunError, match="no events yet"):
        report(tmp_path, "x")


def test_attempts_are_read_in_number_order(tmp_path: Path):
    for number, t in ((2, 100.0), (10, 200.0)):
        rollout, training = logs(tmp_path / f"attempt-{number}")
        with rollout, training:
            serial_iteration(rollout, training, t)
            rollout.command(t, EndEvaluation(iteration=0, version=0, count=1, reward_mean=t))
    assert report(tmp_path, "x")["evaluations"][0]["reward_mean"] == 200.0


def test_nearest_rank_is_a_value_that_occurred():
    assert nearest_rank([], 0.5) is None
    assert nearest_rank([7], 0.95) == 7
    assert nearest_rank(list(range(1, 101)), 0.95) == 95
    assert nearest_rank([1, 2], 0.5) == 1


@pytest.mark.timeout(60)
def test_two_hundred_thousand_events_are_read_in_five_seconds_of_cpu(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    groups, k = 64, 16
    with rollout, training:
        for iteration in range(97):
            t, ids = 100.0 * iteration, list(range(groups * iteration, groups * (iteration + 1)))
            request(rollout, t, iteration, ids, k)
            for group in ids:
                for sample in range(k):
                    turn(rollout, t + 5, group, sample, 40 + sample, t)
                    scored = TrajectoryScored(t=t + 6, trajectory=TrajectoryId(group, sample), reward=1.0, started_t=t + 5)
                    rollout.event(scored)
                send(rollout, t + 6, iteration, group, group - ids[0], (1.0,) * k)
            rollout.command(t + 6, EndRollout(iteration=iteration, version=iteration, groups_sent=groups, groups_dropped=0))
            training.command(t + 6, BeginStep(step=iteration, iteration=iteration))
            for number, group in enumerate(ids):
                micro_batch(training, t + 6, number, 0, iteration, [group])
                trained(training, t + 6 + number, t + 7 + number, number, 0)
            training.command(t + 71, FinishStep(step=iteration, iteration=iteration, groups=tuple(ids)))
            step_done(training, t + 71, t + 72, iteration)
    assert rollout.seq + training.seq > 200_000
    began = time.process_time()
    rows = report(tmp_path, "big")["iterations"]
    took = time.process_time() - began
    assert len(rows) == 97 and rows[96]["train_busy_s"] == 65.0 and rows[96]["trajectories"] == groups * k
    assert took < 5.0, f"{took:.1f} s"


# ---- one iteration's timeline


def test_a_timeline_lays_turns_into_slots_and_colours_groups_by_step(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        request(rollout, 10.0, 0, [0, 1, 2])
        turn(rollout, 12.0, 0, 0, 5, 10.0)
        turn(rollout, 14.0, 0, 1, 5, 10.0)
        turn(rollout, 15.0, 1, 0, 5, 12.0)  # takes the slot that was left at 12
        turn(rollout, 16.0, 2, 0, 5, 13.0)  # none is free at 13
        turn(rollout, 16.0, 1, 1, 5, 11.0, engine=3)
        send(rollout, 14.0, 0, 0, 0, (1.0, 0.0))
        send(rollout, 16.0, 0, 1, 1, (1.0, 0.0))
        rollout.command(17.0, DropGroup(group=2, order=2, iteration=0, rewards=(0.0, 0.0), reason="zero variance"))
        rollout.command(17.0, EndRollout(iteration=0, version=0, groups_sent=2, groups_dropped=1))
        for step, (group, start) in enumerate(((0, 14.0), (1, 17.0)), 40):  # steps are counted over the whole run
            training.command(start, BeginStep(step=step, iteration=0))
            micro_batch(training, start, step, 1, step, [group])
            trained(training, start, start + 1, step, 1)
            training.command(start + 1, FinishStep(step=step, iteration=0, groups=(group,)))
            step_done(training, start + 1, start + 1.5, step)
        training.event(WeightsPublished(t=20.0, version=1, started_t=19.0, nbytes=1))
        training.event(CheckpointSaved(t=21.0, iteration=1, started_t=20.0, path="x"))
        serial_iteration(rollout, training, 30.0, iteration=2, first_step=50)
        training.event(WeightsPublished(t=50.0, version=3, started_t=49.0, nbytes=1))
    told = timeline(tmp_path, 0)
    assert told.turns == {
        0: [Bar(0, 0.0, 2.0, 0), Bar(1, 0.0, 4.0, 0), Bar(0, 2.0, 5.0, 1), Bar(2, 3.0, 6.0, None)],
        3: [Bar(0, 1.0, 6.0, 1)],
    }
    assert told.slots == {0: 3, 3: 1}
    assert told.completions == [(4.0, 0), (6.0, 1)]
    assert told.micro_batches == [Bar(1, 4.0, 5.0, 0), Bar(1, 7.0, 8.0, 1)]
    assert told.steps == [Bar(0, 5.0, 5.5, 0), Bar(0, 8.0, 8.5, 1)]
    assert told.publishes == [Bar(0, 9.0, 10.0, None)] and told.saves == [Bar(0, 10.0, 11.0, None)]
    assert (told.first_dispatch, told.rollout_end, told.train_end) == (4.0, 7.0, 8.5)
    assert timeline(tmp_path, None).iteration == 2


def test_a_timeline_is_of_the_attempt_that_completed_the_iteration(tmp_path: Path):
    for number, end in ((1, 5.0), (2, None), (3, None)):
        rollout, training = logs(tmp_path / f"attempt-{number}")
        with rollout, training:
            if end:
                serial_iteration(rollout, training, 0.0)
            else:
                request(rollout, float(number), 0, [0, 1])
                turn(rollout, 7.0, 0, 0, 5, 6.0)
    assert timeline(tmp_path, 0).train_end == 18.0
    (tmp_path / "attempt-1").rename(tmp_path / "attempt-was-1")
    unfinished = timeline(tmp_path, 0)
    assert unfinished.train_end is None and unfinished.turns[0][0].start == 3.0  # the latest: attempt 3 asked at 3 s


def test_an_iteration_that_the_run_does_not_hold_is_refused_with_those_it_does(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        serial_iteration(rollout, training, 0.0)
    with pytest.raises(RunError, match=r"--iteration 9: not in this run \(it holds 0 to 0\)"):
        timeline(tmp_path, 9)


def test_a_pipeline_of_two_stages_idles_a_third_of_a_call_of_two_micro_batches(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        training.event(TrainerReady(t=3.0, iteration=0, version=0, replicas=1, stages=2))
        serial_iteration(rollout, training, 100.0)
    [row] = report(tmp_path, "hand")["iterations"]
    assert row["pipeline_bubble"] == 1 / 2, "one micro-batch a call"
    lines = (tmp_path / "attempt-1" / "events" / "rank00001.jsonl").read_text().replace('"cuts":[]', '"cuts":[3,1]')
    (tmp_path / "attempt-1" / "events" / "rank00001.jsonl").write_text(lines)
    assert report(tmp_path, "hand")["iterations"][0]["pipeline_bubble"] == pytest.approx(1 / 3)


def test_the_files_of_a_thousand_ranks_need_not_be_open_at_once(tmp_path: Path):
    rollout, training = logs(tmp_path / "attempt-1")
    with rollout, training:
        serial_iteration(rollout, training, 0.0)
    for rank in range(2, 200):
        with EventLog(tmp_path / "attempt-1" / "events", rank) as log:
            log.note(0.0, "JobStarted", role="training", host="n", attempt=1, pid=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        assert len(report(tmp_path, "x")["iterations"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

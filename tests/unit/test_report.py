from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from rpipe.core.eventlog import EventLog
from rpipe.core.events import (
    BeginStep,
    EndEvaluation,
    EndRollout,
    FinishStep,
    GroupSpec,
    MicroBatchDone,
    RolloutRequested,
    SendGroup,
    Slice,
    StepDone,
    TrainMicroBatch,
    TurnFinished,
)
from rpipe.core.types import TrajectoryId
from rpipe.report import main, write


def make_run(run: Path, iterations: int, rewards: tuple[float, float] = (1.0, 0.0), skip: int | None = None) -> Path:
    """Every iteration: one group of two, 4 s of rollout, 1 s of micro-batch, 1 s of step; 100 tokens."""
    run.mkdir()
    (run / "config.yaml").write_text("run: {name: tidy}\n")
    rollout, training = EventLog(run / "attempt-1" / "events", 0), EventLog(run / "attempt-1" / "events", 1)
    with rollout, training:
        for i in range(iterations):
            t = 10.0 * i
            rollout.command(t, EndEvaluation(iteration=i, version=i, count=8, reward_mean=0.25 + i / 100))
            groups = (GroupSpec(i, 4),)
            rollout.event(
                RolloutRequested(t=t, iteration=i, version=i, purpose="train", trajectories_per_group=2, groups=groups)
            )
            for sample in (0, 1):
                turn = {"engine": 0, "cached_tokens": 0, "finish": "stop", "started_t": t, "first_token_t": t, "version": i}
                rollout.event(TurnFinished(t=t + 3, trajectory=TrajectoryId(i, sample), output_tokens=50, **turn))
            rollout.command(t + 4, SendGroup(group=i, order=0, iteration=i, version=i, rewards=rewards, advantages=rewards))
            rollout.command(t + 4, EndRollout(iteration=i, version=i, groups_sent=1, groups_dropped=0))
            training.command(t + 4, BeginStep(step=i, iteration=i))
            parts = (Slice(i, (0, 1)),)
            training.command(t + 4, TrainMicroBatch(micro_batch=i, replica=0, step=i, slices=parts, tokens=108))
            training.event(
                MicroBatchDone(t=t + 5, replica=0, micro_batch=i, started_t=t + 4, ended_t=t + 5, trajectories=2, tokens=108)
            )
            training.command(t + 5, FinishStep(step=i, iteration=i, groups=(i,)))
            stats = dict.fromkeys(("loss", "learning_rate", "entropy", "clip_fraction", "kl"), 0.0)
            gap = {"logprob_gap_mean": 2e-6, "logprob_gap_max": 9e-6, "grad_norm": 1.0, "trained_tokens": 100}
            training.event(StepDone(t=t + 6, step=i, started_t=t + 5, skipped=i == skip, **stats, **gap))
        rollout.note(10.0 * iterations, "JobEnded", reason="")
    return run


def test_json_holds_what_scripts_rely_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path / "a", 2)
    assert main([str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["rollout_to_train_end_s"] for row in told["iterations"]] == [6.0, 6.0]
    assert told["iterations"][1]["waiting_ratio_busy"] == 1 - 2 / 6 and told["attempts"] == 1
    assert told["evaluations"] == [
        {"iteration": 0, "reward_mean": 0.25, "count": 8},
        {"iteration": 1, "reward_mean": 0.26, "count": 8},
    ]
    assert told["run"]["name"] == "tidy" and told["run"]["tokens_per_s"] == 25.0 and told["run"]["ended"] == ""


def test_the_table_has_a_row_an_iteration_and_the_medians(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(make_run(tmp_path / "a", 3))]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:6] for row in rows] == [[str(i), "4.00", "2.00", "6.00", "4.00", "67%"] for i in range(3)]
    assert "median     4.00" in out and "where 30.0 s went: rollout 40%, other 40%, training after rollout 20%" in out
    assert "held-out reward  0.250 -> 0.270 (+0.020), 8 trajectories" in out
    assert "…" not in out


def test_of_many_iterations_the_first_and_the_last_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(make_run(tmp_path / "a", 100))]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:6].strip().lstrip("+").isdigit()]
    assert rows == [*map(str, range(8)), "+84", *map(str, range(92, 100))]


def test_what_stops_learning_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(make_run(tmp_path / "a", 3, rewards=(0.0, 0.0), skip=1))]) == 0
    out = capsys.readouterr().out
    assert "note: every reward of iterations 0-2 was the same (0): nothing to learn from" in out
    assert "note: 1 step skipped in iteration 1: a gradient was not finite" in out


def test_write_leaves_a_whole_report_and_says_what_a_job_ends_with(tmp_path: Path):
    run = make_run(tmp_path / "a", 2)
    (run / "report.json").write_text("an older one")
    text = write(run)
    told = json.loads((run / "report.json").read_text())
    assert len(told["iterations"]) == 2
    assert sorted(p.name for p in run.iterdir()) == ["attempt-1", "config.yaml", "report.json"]
    assert text.splitlines() == [
        "tidy: 2 iterations in 20.0 s",
        "  held-out reward  0.250 -> 0.260 (+0.010), 8 trajectories",
        "  training reward  0.500 -> 0.500",
        "  median iteration rollout 4.00 s, train 2.00 s, rollout to train end 6.00 s; the trainer waits 67%",
        "  generated        200 tokens at 25 tokens/s of rollout; responses p50 50, p95 50 tokens, 0% cut",
        "  log-prob gap     mean 2.0e-06, max 9.0e-06 (medians); 0 skipped steps",
        "  why              the trainer waited 67% of the 2 iterations",
        "                   - 50 points of it for the first groups to be complete; worst, 50% of iteration 0",
        "                   - 17 points of it for order and dispatch; worst, 17% of iteration 0:"
        " group 0 was there, but not handed out: 17 points",
    ]


def test_why_the_job_failed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path / "a", 2)
    (run / "attempt-1" / "failure-rank00003.txt").write_text("no group for 120 s\n")
    assert main([str(run)]) == 0
    assert "note: attempt 1 ended: rank 3: no group for 120 s\n" in capsys.readouterr().out


def test_csv_has_every_figure_of_every_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(make_run(tmp_path / "a", 2)), "--csv", str(tmp_path / "a.csv")]) == 0
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["iteration"] for row in rows] == ["0", "1"] and float(rows[1]["first_dispatch_s"]) == 4.0


def test_two_runs_are_shown_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a, b = make_run(tmp_path / "a", 2), make_run(tmp_path / "b", 3)
    assert main([str(a), str(b)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if "rollout_s" in line).split() == ["rollout_s", "4.00", "4.00", "1.000"]


def test_two_runs_are_compared_for_machines_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a, b = make_run(tmp_path / "a", 2), make_run(tmp_path / "b", 3, rewards=(1.0, 1.0))
    assert main([str(a), str(b), "--json", "--csv", str(tmp_path / "x.csv")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [len(told[side]["iterations"]) for side in "ab"] == [2, 3] and told["a"]["run"]["name"] == "tidy (a)"
    assert told["metrics"]["reward_mean"] == {"a": 0.5, "b": 1.0, "ratio": 2.0}
    assert told["metrics"]["groups_dropped"] == {"a": 0, "b": 0, "ratio": None}, "nothing is a multiple of 0"
    assert set(told["metrics"]) == {*told["a"]["run"]["medians"], "tokens_per_s"}
    with (tmp_path / "x.csv").open() as file:
        rows = {row.pop("metric"): row for row in csv.DictReader(file)}
    assert list(rows) == list(told["metrics"])
    assert rows["reward_mean"] == {"a": "0.5", "b": "1.0", "ratio": "2.0"} and rows["groups_dropped"]["ratio"] == ""


def test_data_of_more_runs_than_two_and_pictures_of_more_than_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runs = [str(make_run(tmp_path / name, 1)) for name in "abc"]
    for options, message in (
        ([*runs, "--json"], "--json and --csv want one run, or two to compare"),
        ([*runs, "--csv", str(tmp_path / "x.csv")], "--json and --csv want one run, or two to compare"),
        ([*runs[:2], "--timeline", str(tmp_path / "x.png")], "--timeline and --trace want one run"),
    ):
        assert main(options) == 2
        assert capsys.readouterr().err == f"{message}\n"
    assert not (tmp_path / "x.csv").exists()


def test_two_runs_of_one_name_are_told_apart_by_their_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    a, b = make_run(tmp_path / "a", 2), make_run(tmp_path / "b", 3)
    assert main([str(a), str(b), "--html", str(tmp_path / "x.html")]) == 0
    assert "<h1>tidy (a) against tidy (b)</h1>" in (tmp_path / "x.html").read_text()
    assert "tidy (a)" in capsys.readouterr().out


def test_a_run_that_began_no_iteration_yet_still_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path / "a", 0)
    log = EventLog(run / "attempt-1" / "events", 0)
    with log:
        log.event(RolloutRequested(t=1.0, iteration=0, version=0, purpose="train", trajectories_per_group=2, groups=()))
    assert main([str(run)]) == 0
    assert "tidy: 0 iterations" in capsys.readouterr().out
    assert main([str(run), "--json"]) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda run: None, "no such directory"),
        (lambda run: run.mkdir(), "not a run dir"),
        (lambda run: make_run(run, 0), "no events yet"),
        (lambda run: (make_run(run, 1) / "attempt-1/events/rank00000.jsonl").write_text("what?\n"), "rank00000.jsonl:1"),
    ],
)
def test_what_cannot_be_reported_is_one_line_and_exit_2(make, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make(tmp_path / "a")
    assert main([str(tmp_path / "a")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_a_timeline_is_drawn_and_what_cannot_be_drawn_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    run = make_run(tmp_path / "a", 3)
    assert main([str(run), "--timeline", str(tmp_path / "a.png"), "--iteration", "1"]) == 0
    picture = (tmp_path / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert main([str(run), "--timeline", str(tmp_path / "a.png"), "--iteration", "7"]) == 2
    assert "it holds 0 to 2" in capsys.readouterr().err
    assert main([str(run), "--timeline", str(tmp_path / "a.docx")]) == 2
    assert "wanted: FILE.png" in capsys.readouterr().err
    assert main([str(run), "--timeline", str(tmp_path / "nowhere" / "a.png")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err

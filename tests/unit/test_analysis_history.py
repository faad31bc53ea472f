"""Attempts of one run on one calendar: gaps, and work that was done twice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rpipe.analysis.summary import report
from rpipe.report import main
from tests.timed_job import TimedJob


def interrupted_run(run: Path, dated: bool = True) -> tuple[float, float]:
    """Attempt 1 is killed in iteration 2 of 4, its checkpoint holds one: attempt 2 trains 1, 2 and 3. When each ended."""
    world = {"rollout": {"iterations": 4}, "training": {"iterations": 4, "checkpoint_every_iterations": 2}}
    whole = TimedJob(run / "whole", **world).run()
    ends = [row["t"] for row in records(whole) if row["kind"] == "EndRollout"]
    killed_t = ends[2] - 0.5  # iterations 0 and 1 were complete, 2 was being rolled out
    wall = (1000.0, 1100.0) if dated else (None, None)
    TimedJob(run / "attempt-1", **world, ends_at_s=killed_t, unix_s=wall[0]).run()
    TimedJob(run / "attempt-2", **world, starts_at=(1, 1), unix_s=wall[1]).run()
    return max(r["t"] for r in records(run / "attempt-1")), max(r["t"] for r in records(run / "attempt-2"))


def records(attempt: Path) -> list[dict]:
    from rpipe.analysis.run import read

    return list(read(attempt))


def test_attempts_stand_on_one_calendar_with_the_gap_between_and_the_work_done_twice(tmp_path: Path):
    first_s, second_s = interrupted_run(tmp_path)
    told = report(tmp_path, "x")
    assert [row["iteration"] for row in told["iterations"]] == [0, 1, 2, 3]
    one, two = told["run"]["history"]
    assert (one["start_s"], one["seconds"], one["gap_s"]) == (0.0, first_s, 0.0)
    assert (two["start_s"], two["seconds"], two["gap_s"]) == (100.0, second_s, pytest.approx(100.0 - first_s))
    assert one["repeated_iterations"] == [1, 2] and two["repeated_iterations"] == []
    finished = [r for r in records(tmp_path / "attempt-1") if r["kind"] == "TurnFinished" and r["trajectory"][0] >= 8]
    assert one["repeated_trajectories"] == len(finished) > 32
    assert one["repeated_tokens"] == sum(r["output_tokens"] for r in finished)
    asked = [r["t"] for r in records(tmp_path / "attempt-1") if r["kind"] == "RolloutRequested"]
    assert one["repeated_s"] > first_s - asked[1] - 2 and one["repeated_s"] <= first_s - asked[1]
    last = told["run"]["diagnosis"][-2:]
    assert last[0].startswith(f"2 attempts in {100 + second_s:.0f} s, {100 - first_s:.0f} s of it between them")
    assert last[1].startswith(f"attempt 1's work on iterations 1 to 2 was done again: {len(finished)} trajectories")


def test_a_log_without_a_calendar_is_placed_by_its_files_last_change(tmp_path: Path):
    first_s, second_s = interrupted_run(tmp_path, dated=False)
    for number, ended_unix_s in ((1, 5000.0 + first_s), (2, 6000.0 + second_s)):
        for log in (tmp_path / f"attempt-{number}" / "events").iterdir():
            os.utime(log, (ended_unix_s, ended_unix_s))
    two = report(tmp_path, "x")["run"]["history"][1]
    assert two["start_s"] == pytest.approx(1000.0) and two["gap_s"] == pytest.approx(1000.0 - first_s)


def test_attempts_never_overlap_though_clocks_disagree(tmp_path: Path):
    first_s, _ = interrupted_run(tmp_path)
    log = tmp_path / "attempt-2" / "events" / "rank00000.jsonl"
    log.write_text(log.read_text().replace('"unix_s":1100.0', '"unix_s":900.0'))
    two = report(tmp_path, "x")["run"]["history"][1]
    assert two["start_s"] == first_s and two["gap_s"] == 0.0


def test_kinds_that_no_figure_comes_from_are_counted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    interrupted_run(tmp_path)
    log = tmp_path / "attempt-2" / "events" / "rank00001.jsonl"
    with log.open("a") as file:
        for seq in range(3):
            file.write(f'{{"v":1,"t":{50 + seq}.0,"rank":1,"seq":{9000 + seq},"io":"event","kind":"MoonRose","phase":1}}\n')
    assert report(tmp_path, "x")["run"]["other_events"] == {"MoonRose": 3}
    assert main([str(tmp_path)]) == 0
    assert "other events: MoonRose 3" in capsys.readouterr().out


def test_groups_that_a_later_attempt_took_over_were_not_done_twice(tmp_path: Path):
    world = {"rollout": {"iterations": 1}, "training": {"iterations": 1}}
    whole = records(TimedJob(tmp_path / "whole", **world).run())
    sent = [r for r in whole if r["kind"] == "SendGroup"]
    TimedJob(tmp_path / "attempt-1", **world, ends_at_s=sent[3]["t"] + 0.001, unix_s=0.0).run()
    finished = [r for r in records(tmp_path / "attempt-1") if r["kind"] == "TurnFinished"]
    kept: dict[int, tuple[int, ...]] = {}
    for group in (r["group"] for r in sent[:3]):
        mine = sorted((r["trajectory"][1], r["output_tokens"]) for r in finished if r["trajectory"][0] == group)
        kept[group] = tuple(tokens for _, tokens in mine)
    TimedJob(tmp_path / "attempt-2", **world, kept=kept, unix_s=50.0).run()
    told = report(tmp_path, "x")
    one = told["run"]["history"][0]
    assert one["repeated_trajectories"] == len(finished) - 12 > 0
    assert one["repeated_tokens"] == sum(r["output_tokens"] for r in finished) - sum(map(sum, kept.values()))
    [row] = told["iterations"]
    lengths = [r["output_tokens"] for r in whole if r["kind"] == "TurnFinished"]
    assert row["trajectories"] == 32 and row["generated_tokens"] == sum(lengths) - sum(map(sum, kept.values()))
    assert told["run"]["response_tokens_p50"] in lengths  # what was taken over counts with its own length


def test_what_the_launcher_wrote_dates_an_attempt_and_says_why_it_ended(tmp_path: Path):
    first_s, _ = interrupted_run(tmp_path, dated=False)
    for number, started, cause in ((1, 1000.0, "SIGTERM: preempted"), (2, 1200.0, "")):
        told = {
            "attempt": number,
            "started_unix_s": started,
            "ended_unix_s": 1.0,
            "cause": cause,
            "nodes": "n[1-3]",
            "job": "17",
        }
        (tmp_path / f"attempt-{number}" / "attempt.json").write_text(json.dumps(told))
    run = report(tmp_path, "x")["run"]
    one, two = run["history"]
    assert two["start_s"] == 200.0 and two["gap_s"] == pytest.approx(200.0 - first_s)
    assert (one["ended"], one["nodes"], one["job"], two["ended"]) == ("SIGTERM: preempted", "n[1-3]", "17", "")
    assert "attempt 1 ended: SIGTERM: preempted" in run["problems"]


def test_a_simulated_run_says_so_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    TimedJob(tmp_path / "run" / "attempt-1").run()
    log = tmp_path / "run" / "attempt-1" / "events" / "rank00000.jsonl"
    note = '{"v":1,"t":0.0,"rank":0,"seq":0,"io":"note","kind":"Simulated","hardware":"a800 (UNCALIBRATED)"}\n'
    log.write_text(note + log.read_text())
    assert main([str(tmp_path / "run"), "--html", str(tmp_path / "x.html")]) == 0
    out = capsys.readouterr().out
    assert "run (simulated): 3 iterations" in out and "hardware         a800 (UNCALIBRATED)" in out
    assert '"simulated":"a800 (UNCALIBRATED)"' in (tmp_path / "x.html").read_text()
    assert main([str(tmp_path / "run"), str(tmp_path / "run")]) == 0
    assert "(simulated)" in capsys.readouterr().out

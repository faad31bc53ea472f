"""Logs of verl, slime and AReaL, made by hand in their formats: what stands in them is read, what is torn is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rpipe.analysis.foreign.report import report
from rpipe.analysis.run import RunError
from rpipe.report import main

RAY = "\x1b[36m(TaskRunner pid=4711)\x1b[0m "


def verl_line(step: int, **more: object) -> str:
    figures = {
        "global_seqlen/min": 1000,
        "actor/pg_loss": f"np.float64({0.01 * step})",
        "critic/rewards/mean": 0.1 * step,
        "response_length/mean": 200.5,
        "response_length/max": "np.int64(512)",
        "num_turns/mean": 2.0,
        "timing_s/gen": 10.0 + step,
        "timing_s/reward": 0.5,
        "timing_s/old_log_prob": 2.0,
        "timing_s/ref": 1.0,
        "timing_s/adv": 0.25,
        "timing_s/update_actor": 6.75,
        "timing_s/step": 20.0,
        "timing_s/agent_loop/tool_calls/mean": 1.5,
        "perf/total_num_tokens": 123456,
        "perf/throughput": 3.5e2,
        **more,
    }
    return f"step:{step}" + "".join(f" - {key}:{value}" for key, value in figures.items())


def read(tmp_path: Path, text: str, name: str = "x.log") -> dict:
    (tmp_path / name).write_text(text)
    told = report(tmp_path / name, name)
    assert told is not None
    return told


def test_a_verl_console_is_read_under_our_names(tmp_path: Path):
    score = {"val-core/openai/gsm8k/reward/mean@1": 0.25}
    told = read(tmp_path, f"hello\n{RAY}{verl_line(1)}\n{RAY}{verl_line(2, **score)}\n")
    assert told["run"]["system"] == "verl" and [row["iteration"] for row in told["iterations"]] == [1, 2]
    row = told["iterations"][1]
    assert (row["rollout_s"], row["train_busy_s"], row["rollout_to_train_end_s"]) == (12.0, 10.0, 20.0)
    assert row["waiting_ratio_busy"] == 0.5 and row["reward_mean"] == 0.2 and row["tool_s"] == 1.5
    assert (
        row["raw"]["actor/pg_loss"] == 0.02
        and row["raw"]["response_length/max"] == 512
        and row["raw"]["perf/throughput"] == 350
    )
    assert told["evaluations"] == [{"iteration": 2, "reward_mean": 0.25, "count": None}]
    assert told["run"]["unread"] == ["1 other lines hold no figures"]


def test_an_older_verl_writes_timing_without_s(tmp_path: Path):
    told = read(tmp_path, "step:7 - timing/gen:4.5 - timing/update_actor:1.5 - timing/step:6.0 - critic/score/mean:nan\n")
    [row] = told["iterations"]
    assert (row["iteration"], row["rollout_s"], row["train_busy_s"], row["waiting_ratio_busy"]) == (7, 4.5, 1.5, 0.75)
    assert row["reward_mean"] is None and row["raw"]["critic/score/mean"] is None


def test_torn_joined_and_coloured_verl_lines_survive_and_are_counted(tmp_path: Path):
    text = (
        f"\x1b[32mTraining Progress:  10%|# | 1/10\r{RAY}{verl_line(1)}{verl_line(2)}\n"  # a bar, then two in one line
        "step:3 - timing_s/gen:5.0 - timing_s/st(WorkerDict pid=12) saved\n"  # another process wrote into it
        "ep:9.0 - actor/entropy:0.5 - perf/mfu:0.2\n"  # the rest of that line
        "step:4 - timing_s/gen:\x1b[1m6.5\x1b[0m - perf/mfu:0.2(WorkerDict pid=12) saved\n"
        "step:5 - timing_s/gen:7.5 - timing_s/step:12"  # killed while it wrote: 12 or 120?
    )
    told = read(tmp_path, text)
    assert {row["iteration"]: row["rollout_s"] for row in told["iterations"]} == {1: 11.0, 2: 12.0, 3: 5.0, 4: 6.5, 5: 7.5}
    assert told["iterations"][4]["rollout_to_train_end_s"] is None and "perf/mfu" not in told["iterations"][3]["raw"]
    assert told["iterations"][0]["raw"] | {"critic/rewards/mean": 0.2} != told["iterations"][1]["raw"]
    unread = told["run"]["unread"]
    assert unread[0] == "could not be read: 1 figures run into other text, 1 parts of a step without its number, 2 torn figures"
    assert len(unread) == 6 and any("12" in line for line in unread)


def test_a_step_printed_again_after_a_resume_counts_once(tmp_path: Path):
    told = read(tmp_path, "step:1 - timing_s/gen:1.0\nstep:2 - timing_s/gen:2.0\nstep:2 - timing_s/gen:3.0\n")
    assert [row["rollout_s"] for row in told["iterations"]] == [1.0, 3.0]


def slime_lines(k: int) -> list[str]:
    actor = "\x1b[36m(MegatronTrainRayActor pid=2)\x1b[0m "
    rollout = {"perf/rollout_time": 10.0 + k, "perf/tokens_per_gpu_per_sec": 812.5, "rollout/response_len/mean": 511.5}
    rollout |= {"rollout/zero_std/count_0": 3, "rollout/zero_std/count_1.0": 1}
    trainer = {"perf/train_wait_time": 14.0 + k, "perf/train_time": 8.0, "perf/log_probs_time": 1.0, "perf/step_time": 22.0 + k}
    trainer |= {"perf/update_weights_time": 2.0 + k, "perf/save_model_time": 1.0, "perf/wait_time_ratio": 0.64}
    return [
        f"(RolloutManager pid=1) [2026-01-02 03:04:05] metrics.py:10 - perf {k}: {rollout}",
        f"{actor}rollout {k}: {{'rollout/raw_reward': 0.{k + 1}, 'rollout/advantages': nan}}",
        f"{actor}step {2 * k}: {{'train/loss': tensor(0.5, device='cuda:0'), 'train/grad_norm': np.float64(1.5)}}",
        f"{actor}step {2 * k + 1}: {{'train/loss': 0.25, 'train/grad_norm': inf}}",
        f"{actor}perf {k}: {trainer}",
    ]


def test_slime_s_two_perf_lines_are_merged_and_its_off_by_one_is_undone(tmp_path: Path):
    lines = [line for k in range(3) for line in slime_lines(k)]
    told = read(tmp_path, "\n".join([*lines, "eval 2: {'eval/gsm8k': 0.75, 'eval/gsm8k/truncated_ratio': 0.5}", ""]))
    assert told["run"]["system"] == "slime" and told["run"]["unread"] == []
    one = told["iterations"][1]
    assert one["rollout_s"] == 11.0 and one["train_busy_s"] == 8.0 and one["reward_mean"] == 0.2 and one["steps"] == 2
    # 15 s of waiting hold 3 s of weights and 1 s of saving, which belong to rollout 0
    assert one["rollout_to_train_end_s"] == 11.0 + 8.0 and one["waiting_ratio_busy"] == pytest.approx(11 / 19)
    assert [row["publish_s"] for row in told["iterations"]] == [3.0, 4.0, None]
    assert [row["flat_groups"] for row in told["iterations"]] == [4, 4, 4]
    assert told["evaluations"] == [{"iteration": 2, "reward_mean": 0.75, "count": None}]


def test_torn_and_joined_slime_lines_survive_and_are_counted(tmp_path: Path):
    lines = slime_lines(0)
    text = (
        lines[0] + lines[1] + "\n"  # joined
        "perf 1: {'perf/rollout_time': 11.0, 'perf/tokens_per_gpu_per_sec': 8(Worker pid=3) busy\n"  # torn
        "12.5, 'rollout/response_len/mean': 100.0}\n"  # its rest
        + lines[4] + "\nperf 2: {'perf/rollout_time': 12.0, 'perf/train_wait_ti"
    )  # fmt: skip
    told = read(tmp_path, text)
    assert {row["iteration"]: row["rollout_s"] for row in told["iterations"]} == {0: 10.0, 1: 11.0, 2: 12.0}
    assert told["iterations"][0]["train_busy_s"] == 8.0 and told["iterations"][0]["reward_mean"] == 0.1
    assert "perf/tokens_per_gpu_per_sec" not in told["iterations"][1]["raw"]
    assert told["run"]["unread"][0] == "could not be read: 1 parts of figures without their number, 2 torn figures"


def test_of_slime_s_figures_run_together_without_a_space_none_is_lost(tmp_path: Path):
    told = read(tmp_path, "perf 0: {'perf/rollout_time': 10.0}perf 1: {'perf/rollout_time': 11.0}step 0: {'train/loss': 0.5}\n")
    assert [row["rollout_s"] for row in told["iterations"]] == [10.0, 11.0] and told["run"]["unread"] == []


def test_a_verl_rollout_dump_is_read_from_its_folder_or_file(tmp_path: Path):
    dump = tmp_path / "dump"
    dump.mkdir()
    for step, scores in ((1, [1.0, 0.0]), (10, [1.0, 1.0]), (2, [0.0, 0.0])):
        records = [{"input": "q", "output": "abcd", "gts": "1", "score": s, "step": step, "uid": "u"} for s in scores]
        (dump / f"{step}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"input": "q", "outp')
    told = report(dump, "dump")
    assert told is not None and told["run"]["system"] == "verl dump"
    assert [(r["iteration"], r["reward_mean"], r["mixed_groups"]) for r in told["iterations"]] == [
        (1, 0.5, 1),
        (2, 0, 0),
        (10, 1, 0),
    ]
    assert told["run"]["unread"][0].startswith("could not be read: 1 damaged records of 1.jsonl")
    one = report(dump / "10.jsonl", "one")
    assert one is not None and one["iterations"][0]["response_characters_mean"] == 4


def test_areal_sessions_tell_where_trajectories_time_went(tmp_path: Path):
    sessions = tmp_path / "logs"
    sessions.mkdir()
    records = [
        {
            "task_id": i,
            "session_id": i,
            "submit_ts": 1000.0 + 40 * i,
            "finalized_ts": 1100.0,
            "total_s": 20.0,
            "generate_s": 12.0,
        }
        | {"reward_s": 3.0, "toolcall_s": 1.0, "phases": {"generate": []}, "counters": {}}
        for i in range(4)
    ]
    (sessions / "sessions-r0.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"task')
    told = report(sessions, "areal")
    assert told is not None and told["run"]["system"] == "areal"
    assert told["run"]["time_s"] == {"generating": 48.0, "rewards": 12.0, "tools": 4.0, "between": 16.0}
    assert sum(row["trajectories"] for row in told["iterations"]) == 4 and told["iterations"][0]["trajectory_s_mean"] == 20.0
    assert told["run"]["unread"][0] == "could not be read: 1 damaged records of sessions-r0.jsonl"


def test_the_command_knows_the_format_and_compares_with_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    verl, slime = tmp_path / "verl.log", tmp_path / "slime.log"
    verl.write_text(f"{RAY}{verl_line(1)}\nstep:2 - timing_s/gen:bad\n")
    slime.write_text("\n".join(slime_lines(0)) + "\n")
    assert main([str(verl)]) == 0
    out = capsys.readouterr().out
    assert "verl.log: verl, 1 rows" in out and "note: could not be read: 1 torn figures" in out and "11.00" in out
    assert main([str(verl), str(slime)]) == 0
    assert "slime.log" in capsys.readouterr().out
    assert main([str(verl), str(slime), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["rollout_s"] == {"a": 11.0, "b": 10.0, "ratio": pytest.approx(10 / 11)}
    assert metrics["turns_mean"] == {"a": 2.0, "b": None, "ratio": None}, "slime says nothing of turns"
    assert main([str(slime), "--csv", str(tmp_path / "slime.csv"), "--json"]) == 0
    assert (tmp_path / "slime.csv").read_text().startswith("iteration,rollout_s,train_busy_s")
    assert json.loads(capsys.readouterr().out)["iterations"][0]["raw"]["perf/step_time"] == 22.0
    assert main([str(slime), str(verl), "--html", str(tmp_path / "both.html")]) == 0
    capsys.readouterr()
    for option in (["--timeline", str(tmp_path / "x.png")], ["--trace", str(tmp_path / "x.json")]):
        assert main([str(slime), *option]) == 2
        assert "wanted: a run dir" in capsys.readouterr().err


def test_a_file_of_no_known_form_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "x.log").write_text("nothing\n" * 3)
    with pytest.raises(RunError, match="nothing in it that is known"):
        report(tmp_path / "x.log", "x")
    assert main([str(tmp_path / "x.log")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_log_of_which_nothing_could_be_read_says_so(tmp_path: Path):
    with pytest.raises(RunError, match=r"a log of verl, but nothing in it could be read; could not be read: 1 torn figures"):
        read(tmp_path, "step:1 - timing_s/gen\n")

"""The whole job with the real engine (SGLang) and the real trainer (Megatron): small models, few iterations."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from rpipe.runtime.dump import read_trajectories
from tests.job.jobs import config, ends, events, members, rank, real, report, started, train, weights


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two engines, two data-parallel replicas, three iterations; the last one in a second attempt."""
    path = tmp_path_factory.mktemp("real") / "run"
    tree = real(
        cluster={"rollout_ranks": 2, "training_ranks": 2},
        data={
            "train": {"kind": "sums", "size": 200, "reward": "tests.job.jobs:random_after_a_while"},
            "held_out": {"kind": "sums", "size": 8, "reward": "last_integer"},
        },
        evaluation={"prompts": 8},
        model={
            "make": {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16},
            "warm_up": {"steps": 3, "sequences_per_step": 16},
        },
    )
    train(path, tree, "run.iterations=2")
    train(path, tree, "run.iterations=3")
    return path


@pytest.mark.timeout(500)
def test_engine_and_trainer_agree_on_log_probs_before_and_after_a_publish(run_dir):
    iterations = report(run_dir)["iterations"]
    assert [i["iteration"] for i in iterations] == [0, 1, 2]
    assert all(0 < i["logprob_gap_max"] < 1e-4 for i in iterations), [i["logprob_gap_max"] for i in iterations]


def test_every_group_is_trained_once_under_the_version_that_sampled_it(run_dir):
    seen = []
    for attempt in (1, 2):
        for event in events(run_dir, 2, "GroupArrived", attempt):
            assert event["version"] == event["iteration"] == event["group"] // 8
            seen.append(event["group"])
    assert sorted(seen) == list(range(24))


def test_both_engines_generate(run_dir):
    assert {e["engine"] for e in events(run_dir, 0, "TurnFinished")} == {0, 1}


def test_the_dump_holds_every_trajectory_with_its_versions(run_dir):
    rows = read_trajectories(run_dir / "trajectories")
    trained = [r for r in rows if r["purpose"] == "train"]
    assert len(trained) == 3 * 32
    for row in trained:
        assert len(row["output_ids"]) == len(row["logprobs"]) > 0
        assert {tuple(span) for span in row["versions"]} == {(0, len(row["output_ids"]), row["iteration"])}


def test_the_report_has_the_keys_that_scripts_rely_on(run_dir):
    found = report(run_dir)
    assert set(found["iterations"][0]) >= {
        "iteration", "rollout_s", "train_busy_s", "rollout_to_train_end_s", "first_dispatch_s", "waiting_ratio_start",
        "waiting_ratio_busy", "steps", "groups_trained", "groups_dropped", "trajectories", "generated_tokens", "reward_mean",
        "logprob_gap_mean", "logprob_gap_max",
    }  # fmt: skip
    assert [(e["iteration"], e["count"]) for e in found["evaluations"]] == [(0, 8), (2, 8), (3, 8)]
    assert found["attempts"] == 2


def test_final_weights_load_in_transformers_and_are_not_the_first_ones(run_dir):
    import torch
    from transformers import AutoModelForCausalLM

    first = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    last = AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype=torch.float32)
    pairs = zip(first.state_dict().values(), last.state_dict().values())
    assert max((a - b).abs().max().item() for a, b in pairs) > 1e-4


def test_the_run_dir_holds_what_the_readme_says(run_dir):
    for name in (
        "config.yaml",
        "environment.json",
        "report.json",
        "trajectories",
        "checkpoints/iteration-000003",
        "hf",
        "tensorboard",
    ):
        assert (run_dir / name).exists(), name


def test_checkpoints_that_are_all_torn_are_refused_before_a_rank_starts(run_dir, tmp_path):
    torn = tmp_path / "run"
    shutil.copytree(run_dir / "checkpoints", torn / "checkpoints")
    places = sorted((torn / "checkpoints").iterdir(), reverse=True)
    for place in places:
        largest = max(place.iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    told = train(torn, config(), code=2)
    assert len(told.splitlines()) == 1 and told.startswith(f"no checkpoint in {torn}/checkpoints can be read: {places[0]}/")
    assert told.count(": the checkpoint is damaged;") == len(places) and "wanted: one of them whole" in told
    assert not list(torn.glob("attempt-*"))


@pytest.mark.timeout(400)
def test_a_two_wide_engine_and_a_tensor_parallel_trainer_agree_in_a_long_tmpdir(tmp_path, monkeypatch):
    """Of more characters than a Unix socket's path may have."""
    temporary = tmp_path / ("long" * 25)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    tree = real(
        run={"iterations": 2, "seed": 5},
        cluster={"rollout_ranks": 2, "training_ranks": 2},
        engine={"tp": 2},
        training={"tp": 2, "trajectories_per_step": 16},
        rollout={"groups_per_iteration": 4, "trajectories_per_group": 4, "max_new_tokens": 24},
    )
    train(tmp_path / "run", tree, timeout_s=380)
    iterations = report(tmp_path / "run")["iterations"]
    assert len(iterations) == 2 and all(0 < i["logprob_gap_max"] < 1e-4 for i in iterations)
    assert not list(temporary.glob("rpipe-*"))


# ---- how a job ends


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_job_at_a_safe_point_with_a_checkpoint_and_one_line(tmp_path, number, code):
    job, run_dir = started(tmp_path, "limits.stop_s=90")  # a safe point may be long in coming on a busy machine
    processes = members(job)
    os.kill(job.pid, number)
    text = ends(job, processes, within_s=120)
    assert job.returncode == code, text
    assert list((run_dir / "checkpoints").glob("iteration-*")), text
    assert text.count("run ended:") == 1, text


def test_usr2_stops_the_job_and_started_again_it_ends_as_if_never_stopped(tmp_path):
    """Scripted trajectories, exact mode: the weights of the interrupted run are those of one that was left alone."""
    tree = config(run={"iterations": 12, "seed": 3}, pipeline={"mode": "exact"}, admission={"policy": "frontier"})
    train(tmp_path / "whole", tree)
    job, run_dir = started(tmp_path, tree=tree)
    os.kill(job.pid, signal.SIGUSR2)
    text = ends(job, members(job))
    assert job.returncode == 75 and "stopped at a safe point" in text, text
    train(run_dir, tree)
    assert weights(tmp_path / "whole") == weights(run_dir)
    assert sorted({e["group"] for n in (1, 2) for e in events(run_dir, 1, "GroupArrived", n)}) == list(range(96))


@pytest.mark.parametrize("victim, role", [(0, "rollout"), (1, "training")])
def test_a_killed_rank_ends_the_job_with_one_line_that_names_it(tmp_path, victim, role):
    job, _ = started(tmp_path)
    processes = members(job)
    rank(processes, victim).kill()
    text = ends(job, processes)
    assert job.returncode == 1
    lines = [line for line in text.splitlines() if line.startswith("run ended:")]
    assert len(lines) == 1 and f"rank {victim}" in lines[0] and role in lines[0] and "signal 9" in lines[0], text


def test_where_no_restart_is_wanted_a_dead_engine_ends_the_job_with_one_line_that_names_it(tmp_path):
    job, _ = started(tmp_path, "engine.restarts=0")
    processes = members(job)
    engine = next(p for p in processes if "scheduler" in " ".join(p.cmdline()) or "scheduler" in p.name())
    engine.kill()
    text = ends(job, processes)
    assert job.returncode == 1
    lines = [line for line in text.splitlines() if line.startswith("run ended:")]
    assert len(lines) == 1 and "engine 0" in lines[0], text

"""Engines that die or fall silent in a running job, and odd cases that look like it: what comes out has the right counts.

The real engine is killed and stopped in one job; everything else is scripted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rpipe.runtime.dump import read_trajectories
from tests.job.jobs import config, ends, events, members, rank, real, report, started, train, weights

SLOW = {"kind": "scripted", "stall_deadline_s": 10.0}  # nothing healthy is silent for so long, on however busy a machine


def scripted(**sections: Any) -> dict[str, Any]:
    """Slow enough for a fault to meet work in flight; exact mode, so that the final weights tell whether anything differed."""
    engine = sections.pop("engine", {})
    options = {"median_tokens": 24, "sigma": 0.7, "tokens_per_s": 60, **engine.pop("options", {})}
    return config(
        pipeline={"mode": "exact"},
        admission={"policy": "frontier"},
        engine={**SLOW, "options": options, **engine},
        **sections,
    )


def counts(run_dir: Path, training_rank: int, iterations: int, groups: int = 8, samples: int = 4) -> None:
    """Every trajectory once, under its own version; every group trained once; every iteration whole."""
    answers = Counter(tuple(e["trajectory"]) for e in events(run_dir, 0, "TurnFinished"))
    assert answers == Counter((g, s) for g in range(groups * iterations) for s in range(samples))
    rows = read_trajectories(run_dir / "trajectories")
    assert len(rows) == groups * iterations * samples
    for row in rows:
        assert row["versions"] == [(0, len(row["output_ids"]), row["iteration"])], row
        assert len(row["logprobs"]) == len(row["output_ids"]) > 0
    trained = Counter(g for e in events(run_dir, training_rank, "FinishStep") for g in e["groups"])
    assert trained == Counter(range(groups * iterations))
    assert [i["groups_trained"] for i in report(run_dir)["iterations"]] == [groups] * iterations


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    train(
        path,
        scripted(run={"iterations": 2, "seed": 3}, cluster={"rollout_ranks": 2}, engine={"options": {"tokens_per_s": 400}}),
    )
    return path


@pytest.mark.parametrize("how", ["fail_after_s", "hang_after_s"])
def test_trajectories_of_a_lost_engine_go_on_elsewhere_and_it_comes_back(undisturbed, tmp_path, how):
    """Engine 1 of two; the trajectories, and so the weights, are those of a run to which nothing happened."""
    options = {how: 1.5, "bad_engine": 1}
    train(
        tmp_path / "run", scripted(run={"iterations": 2, "seed": 3}, cluster={"rollout_ranks": 2}, engine={"options": options})
    )
    run_dir = tmp_path / "run"
    (lost,) = events(run_dir, 0, "EngineLost")
    (back,) = events(run_dir, 0, "EngineRestarted")
    assert lost["engine"] == back["engine"] == 1 and sum(p["output_tokens"] for p in lost["prefixes"]) > 0
    resent = [e for e in events(run_dir, 0, "SendTurn") if e["prefix_tokens"]]
    assert {tuple(e["trajectory"]) for e in resent} <= {tuple(p["trajectory"]) for p in lost["prefixes"]}
    assert {e["engine"] for e in resent} == {0}
    assert any(e["engine"] == 1 and e["t"] > back["t"] for e in events(run_dir, 0, "TurnFinished")), "it serves again"
    assert {e["engine"] for e in events(run_dir, 0, "EngineUpdated") if e["version"] == 2} == {0, 1}, "in a new update group"
    counts(run_dir, 2, 2)
    assert weights(run_dir) == weights(undisturbed)


def test_an_only_engine_is_waited_for(undisturbed, tmp_path):
    train(
        tmp_path / "run", scripted(run={"iterations": 2, "seed": 3}, engine={"options": {"fail_after_s": 1.5, "bad_lives": 2}})
    )
    assert len(events(tmp_path / "run", 0, "EngineRestarted")) == 2
    counts(tmp_path / "run", 1, 2)
    assert weights(tmp_path / "run") == weights(undisturbed)


def test_an_engine_that_keeps_dying_ends_the_job_with_one_line(tmp_path):
    tree = scripted(engine={"options": {"fail_after_s": 0.8, "bad_lives": 99, "tokens_per_s": 1}, "restarts": 2})
    text = train(tmp_path / "run", tree, code=1)
    lines = [line for line in text.splitlines() if line.startswith("run ended:")]
    assert len(lines) == 1 and "engine 0" in lines[0] and "lost 3 times in a row (engine.restarts = 2)" in lines[0], text


# ---- the real engine


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two SGLang engines: one is killed in the middle of a rollout, later the other is stopped (SIGSTOP)."""
    tree = real(
        run={"iterations": 400, "seed": 4},
        cluster={"rollout_ranks": 2, "training_ranks": 1},
        rollout={"groups_per_iteration": 8, "trajectories_per_group": 4, "max_new_tokens": 400},
        engine={"stall_deadline_s": 15.0, "kv_tokens": 32768, "max_running": 16, "stream_interval_tokens": 4},
        # One step an iteration: on each of its tokens engine and trainer hold the same weights.
        training={"trajectories_per_step": 32, "optimizer": {"learning_rate": 1.0e-3}},
    )
    job, run_dir = started(tmp_path_factory.mktemp("struck"), tree=tree, training_rank=2)
    owners = [rank(members(job), number) for number in (0, 1)]
    try:
        for number, (engine, signal_) in enumerate([(1, signal.SIGKILL), (0, signal.SIGSTOP)]):
            _mid_rollout(job, run_dir, engine)
            for process in _model_holders(owners[engine]):
                process.send_signal(signal_)
            _wait(job, run_dir, "EngineRestarted", number + 1)
            _wait(job, run_dir, "EndRollout", len(events(run_dir, 0, "EndRollout")) + 3)  # it takes part in publishes again
        os.kill(job.pid, signal.SIGUSR2)
        text = ends(job, owners, within_s=90)
        assert job.returncode == 75, text
    finally:
        if job.poll() is None:
            job.kill()
    return run_dir


def _model_holders(owner: psutil.Process) -> list[psutil.Process]:
    """The schedulers of a rank's engine: the processes that hold the model."""
    found = []
    for process in owner.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # zombies of an earlier life
            if "scheduler" in process.name() or "scheduler" in " ".join(process.cmdline()):
                found.append(process)
    assert found, "no scheduler among the rank's children"
    return found


def _mid_rollout(job: Any, run_dir: Path, engine: int) -> None:
    """Return when the engine is in the middle of some responses."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert job.poll() is None
        before = _in_flight(run_dir, engine)
        if len(before) >= 2:
            time.sleep(0.2)
            if len(before & _in_flight(run_dir, engine)) >= 2:
                return
        time.sleep(0.02)
    raise AssertionError("no response was ever in flight")


def _in_flight(run_dir: Path, engine: int) -> set[tuple[int, int]]:
    begun = {tuple(e["trajectory"]) for e in events(run_dir, 0, "TurnStarted") if e["engine"] == engine}
    return begun - {tuple(e["trajectory"]) for e in events(run_dir, 0, "TurnFinished")}


def _wait(job: Any, run_dir: Path, kind: str, count: int) -> None:
    end = time.monotonic() + 180
    while len(events(run_dir, 0, kind)) < count:
        assert job.poll() is None, job.stdout.read()
        assert time.monotonic() < end, f"{len(events(run_dir, 0, kind))} x {kind}, wanted {count}"
        time.sleep(0.1)


@pytest.mark.timeout(500)
def test_a_killed_engine_is_restarted_from_the_snapshot_and_its_responses_go_on(struck):
    lost = events(struck, 0, "EngineLost")[0]
    assert lost["engine"] == 1 and lost["prefixes"], lost
    _came_back(struck, lost)


def test_a_stopped_engine_is_noticed_by_its_silence(struck):
    lost = next(e for e in events(struck, 0, "EngineLost") if e["engine"] == 0)
    assert "not healthy" in lost["reason"] or "for 15 s" in lost["reason"] or "take the weights" in lost["reason"], lost
    _came_back(struck, lost)


def _came_back(run_dir: Path, lost: dict[str, Any]) -> None:
    back = next(e for e in events(run_dir, 0, "EngineRestarted") if e["engine"] == lost["engine"] and e["t"] > lost["t"])
    updates = [e for e in events(run_dir, 0, "EngineUpdated") if e["engine"] == lost["engine"]]
    assert all(e["version"] > back["version"] for e in updates if e["t"] > back["t"]) and updates[-1]["t"] > back["t"]
    assert any(e["engine"] == lost["engine"] and e["t"] > back["t"] for e in events(run_dir, 0, "TurnFinished"))


def test_nothing_is_lost_doubled_or_of_another_version(struck):
    done = [e["iteration"] for e in events(struck, 0, "EndRollout")]
    assert done == list(range(len(done))) and len(done) >= 6
    answers = Counter(tuple(e["trajectory"]) for e in events(struck, 0, "TurnFinished"))
    whole = {(g, s) for g in range(8 * len(done)) for s in range(4)}
    assert whole <= set(answers) and set(answers.values()) == {1}
    for row in read_trajectories(struck / "trajectories"):
        assert row["versions"] == [(0, len(row["output_ids"]), row["iteration"])]


def test_log_probs_across_the_seam_are_the_trainers(struck):
    seams = {tuple(e["trajectory"]) for e in events(struck, 0, "SendTurn") if e["prefix_tokens"]}
    assert seams, "no response was continued: this test proves nothing"
    steps = {e["step"]: e for e in events(struck, 2, "FinishStep")}
    gaps = {e["step"]: e["logprob_gap_max"] for e in events(struck, 2, "StepDone")}
    with_seams = [step for step in gaps if {group for group, _ in seams} & set(steps[step]["groups"])]
    assert with_seams and all(0 < gap < 1e-4 for gap in gaps.values()), (with_seams, gaps)
    rows = {(r["group"], r["index"]): r for r in read_trajectories(struck / "trajectories")}
    assert all(np.isfinite(rows[seam]["logprobs"]).all() for seam in seams if seam in rows)


# ---- odd cases that must not look like a fault, and other faults with the right counts


def test_one_token_prompts_eos_first_the_limit_and_groups_of_one(tmp_path):
    """K = 1; responses of one token (their first is EOS) and responses up to the limit, in one job."""
    data = tmp_path / "one.jsonl"
    data.write_text('{"prompt": "5", "answer": "5"}\n' * 12)
    tree = config(
        run={"iterations": 2, "seed": 1},
        data={"train": {"kind": "jsonl", "path": str(data), "reward": "tests.job.jobs:random_after_a_while"}},
        rollout={"groups_per_iteration": 8, "trajectories_per_group": 1, "max_new_tokens": 3},
        training={"trajectories_per_step": 4},
        engine={"kind": "scripted", "options": {"median_tokens": 2, "sigma": 1.0, "tokens_per_s": 400}},
    )
    train(tmp_path / "run", tree)
    counts(tmp_path / "run", 1, 2, samples=1)
    rows = read_trajectories(tmp_path / "run" / "trajectories")
    assert {len(r["prompt_ids"]) for r in rows} == {1}
    alone = [r for r in rows if len(r["output_ids"]) == 1]
    assert alone and all(r["output_ids"][0] == 1 and r["finish"] == "stop" for r in alone), "EOS as the first token"
    cut = [r for r in rows if r["finish"] == "length"]
    assert cut and all(len(r["output_ids"]) == 3 and r["output_ids"][-1] != 1 for r in cut), "generation to the limit"


def odd_reward(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """NaN, a hang, or a number, by the response alone."""
    kind = sum(map(ord, response)) % 7
    if kind == 0:
        return float("nan")
    if kind == 1:
        time.sleep(3600)
    return float(kind % 2)


def test_rewards_that_hang_or_are_nan_score_0_and_are_counted(tmp_path):
    tree = config(
        run={"iterations": 2, "seed": 2},
        data={"train": {"kind": "sums", "size": 200, "reward": "tests.job.test_engine_faults:odd_reward"}},
        reward={"workers": 4, "deadline_s": 1.0},
    )
    train(tmp_path / "run", tree)
    counts(tmp_path / "run", 1, 2)
    scored = events(tmp_path / "run", 0, "TrajectoryScored")
    failed = [e for e in scored if e["error"]]
    assert len(scored) == 64 and {e["reward"] for e in failed} == {0.0}
    assert any("nan" in e["error"].lower() for e in failed) and any("1 s" in e["error"] for e in failed), failed
    assert all(e["loss"] is not None and not e["skipped"] for e in events(tmp_path / "run", 1, "StepDone"))


def nothing_to_learn_at_first(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """The same for all in the first eight prompts that are drawn."""
    return float(sum(map(ord, response)) % 2) if metadata.get("late") else 0.0


def test_an_iteration_without_a_group_that_teaches_is_trained_on_nothing_and_passes(tmp_path):
    data = tmp_path / "data.jsonl"
    lines = [{"prompt": str(i), "answer": "1", "late": i > 7} for i in range(24)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"kind": "jsonl", "path": str(data), "reward": "tests.job.test_engine_faults:nothing_to_learn_at_first"}
    tree = config(
        run={"iterations": 2, "seed": 1}, data={"train": source, "shuffle": False}, rollout={"filter": "zero_variance"}
    )
    train(tmp_path / "run", tree)
    ended = events(tmp_path / "run", 0, "EndRollout")
    assert (ended[0]["groups_sent"], ended[0]["groups_dropped"]) == (0, 8)
    assert ended[1]["groups_sent"] + ended[1]["groups_dropped"] == 8 and ended[1]["groups_sent"] > 0
    assert [e["version"] for e in events(tmp_path / "run", 1, "WeightsPublished")] == [0, 1, 2]
    assert {e["iteration"] for e in events(tmp_path / "run", 1, "FinishStep")} == {1}


def test_a_silent_channel_peer_ends_the_job_with_one_line_and_the_stacks_of_those_that_live(tmp_path):
    """The training coordinator, stopped. (Killed: tests/job/test_job.py.)"""
    tree = config(run={"iterations": 500, "seed": 1}, limits={"message_s": 15, "heartbeat_s": 1})
    job, run_dir = started(tmp_path, tree=tree)
    processes = members(job)
    rank(processes, 1).suspend()
    text = ends(job, processes, within_s=90)
    assert job.returncode == 1
    lines = [line for line in text.splitlines() if line.startswith("run ended:")]
    assert len(lines) == 1 and "rank 0" in lines[0] and "rank 1" in lines[0] and "waiting for" in lines[0], text
    stacks = (run_dir / "attempt-1" / "stacks-rank00000.txt").read_text()
    assert "_turn_crank" in stacks and "waits for" in stacks and "channel:" in stacks and "heard last: rank 1" in stacks

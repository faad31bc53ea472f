"""Whole jobs whose trainer is cut over ranks: pipeline stages, experts; and what a job does with bounded memory.

Scripted engines; everything else is the real job: MPI, the channel, Megatron, publish, checkpoint, export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpipe.core.eventlog import records
from tests.job.jobs import TINY, config, events, report, train

pytestmark = pytest.mark.job


def weights(run_dir: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(run_dir / "hf" / "model.safetensors")


def far(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return max(float(abs(a[name] - b[name]).max()) for name in a)


def job(**sections: dict[str, Any]) -> dict[str, Any]:
    """Exact mode: every layout trains the same groups in the same order. A large epsilon: Adam turns rounding of gradients near
    zero into whole steps otherwise."""
    base: dict[str, Any] = {"run": {"name": "layout", "iterations": 2, "seed": 3}, "pipeline": {"mode": "exact"}}
    base["training"] = {"trajectories_per_step": 16, "optimizer": {"learning_rate": 1.0e-3, "epsilon": 1.0e-5}}
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return config(**base)


MOE = {**TINY, "architecture": "qwen3_moe", "experts": 4}


@pytest.mark.parametrize(("layout", "model"), [({"pp": 2}, TINY), ({"ep": 2}, MOE)], ids=["pp2", "ep2"])
@pytest.mark.timeout(400)
def test_a_job_cut_over_ranks_ends_where_one_rank_does(tmp_path: Path, layout: dict[str, int], model: dict[str, Any]) -> None:
    train(tmp_path / "one", job(model={"make": model}))
    tree = job(model={"make": model}, cluster={"rollout_ranks": 1, "training_ranks": 2})
    tree["training"].update(layout)
    train(tmp_path / "cut", tree)
    assert far(start(tmp_path / "one"), weights(tmp_path / "one")) > 1e-3  # it moved
    assert far(weights(tmp_path / "one"), weights(tmp_path / "cut")) < 1e-5
    one, cut = ([e["loss"] for e in events(tmp_path / name, 1, "StepDone")] for name in ("one", "cut"))
    assert len(one) == 4 and cut == pytest.approx(one, rel=1e-4, abs=1e-5)
    assert [i["groups_trained"] for i in report(tmp_path / "cut")["iterations"]] == [8, 8]


def start(run_dir: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(run_dir / "model" / "model.safetensors")


def test_reinforce_pp_whitens_over_a_step_in_serial_mode(tmp_path: Path) -> None:
    """Advantages leave rollout as rewards; a group whose rewards are all equal still trains, as only a whitened one does."""
    tree = job(pipeline={"mode": "serial"}, run={"iterations": 1}, rollout={"trajectories_per_group": 2})
    tree["training"]["loss"] = {"advantage": "reinforce_pp"}
    train(tmp_path / "run", tree)
    sent = events(tmp_path / "run", 0, "SendGroup")
    assert all(c["advantages"] == c["rewards"] for c in sent)
    assert any(len(set(c["rewards"])) == 1 for c in sent)
    done = events(tmp_path / "run", 1, "StepDone")
    # rewards are 0 or 1: taken as advantages, no token's loss could be positive
    assert any(e["loss"] > 0 for e in done) and all(e["grad_norm"] > 0 for e in done), done


def test_rollout_admits_nothing_while_more_bytes_wait_than_the_queue_holds(tmp_path: Path) -> None:
    """channel.queue_bytes = 1: a group that has left must have been received before another one enters the engines."""
    tree = job(channel={"queue_bytes": 1}, admission={"policy": "frontier", "frontier_groups": 1}, run={"iterations": 1})
    train(tmp_path / "run", tree)
    waiting: set[int] = set()
    entered: list[int] = []
    for record in records(tmp_path / "run" / "attempt-1" / "events" / "rank00000.jsonl"):
        if record["kind"] == "SendGroup":
            waiting.add(record["group"])
        elif record["kind"] == "GroupReceived":
            waiting.discard(record["group"])
        elif record["kind"] == "SendTurn" and record["trajectory"][0] not in entered:
            assert not waiting, (record, waiting)
            entered.append(record["trajectory"][0])
    assert len(entered) == 8 and report(tmp_path / "run")["iterations"][0]["groups_trained"] == 8


@pytest.mark.timeout(500)
def test_sglang_and_two_expert_parallel_ranks_agree_on_experts_log_probs(tmp_path: Path) -> None:
    """Before and after an update, one step an iteration: the trainer's weights are those that the engine sampled with."""
    model = {**MOE, "tied": False}  # SGLang's Qwen3-MoE reads no output layer from the embedding
    tree = job(model={"make": model}, cluster={"rollout_ranks": 1, "training_ranks": 2}, limits={"start_s": 300})
    tree["engine"] = {"kind": "sglang", "kv_tokens": 4096, "max_running": 16}
    tree["training"].update(ep=2, trajectories_per_step=32)
    train(tmp_path / "run", tree, timeout_s=450)
    gaps = [e["logprob_gap_max"] for e in events(tmp_path / "run", 1, "StepDone")]
    assert len(gaps) == 2 and max(gaps) < 1e-3, gaps
    assert far(start(tmp_path / "run"), weights(tmp_path / "run")) > 1e-3

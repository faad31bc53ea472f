"""The same trajectories, delivered at other times: what each pipeline mode promises of the weights.

The engine is scripted (a trajectory follows from its id and the seed), rewards take a random while, everything else is the
real job: MPI, the channel, Megatron, publish, checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rpipe.config import Config
from rpipe.control.rollout import RolloutCoordinator
from rpipe.control.settings import rollout_settings, training_settings
from rpipe.control.training import TrainingCoordinator
from rpipe.core.eventlog import steps
from tests.job.jobs import config, events, report, train, weights
from tests.job.mpi import run_mpi


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each job once: mode and data-parallel size."""
    folder = tmp_path_factory.mktemp("modes")
    found = {}
    for name, mode, policy, replicas in [
        ("serial-1", "serial", "fifo", 1), ("exact-1", "exact", "frontier", 1),
        ("serial-2", "serial", "fifo", 2), ("exact-2", "exact", "frontier", 2), ("fifo-2", "fifo", "frontier", 2),
    ]:  # fmt: skip
        found[name] = folder / name
        tree = config(
            cluster={"rollout_ranks": 1, "training_ranks": replicas}, pipeline={"mode": mode}, admission={"policy": policy}
        )
        train(found[name], tree)
    return found


def arrival(run_dir: Path) -> list[int]:
    return [r["group"] for r in events(run_dir, 1, "GroupArrived")]


@pytest.mark.parametrize("replicas", [1, 2])
def test_exact_ends_bit_equal_to_serial_though_groups_arrive_in_another_order(runs, replicas):
    serial, exact = runs[f"serial-{replicas}"], runs[f"exact-{replicas}"]
    assert arrival(serial) != arrival(exact) != sorted(arrival(exact)), "nothing was shuffled: this test proves nothing"
    assert len(events(exact, 1, "StepDone")) == 12
    assert weights(serial) == weights(exact)


def test_weights_do_move(runs):
    from safetensors.numpy import load_file

    before = load_file(runs["exact-1"] / "model" / "model.safetensors")
    after = load_file(runs["exact-1"] / "hf" / "model.safetensors")
    assert max(float(abs(before[name] - after[name]).max()) for name in after) > 1e-4


def test_fifo_accumulates_the_same_gradient_as_serial_within_a_step(tmp_path):
    """One step an iteration, so that both hold the same groups whatever the order; one step from equal weights."""
    for mode in ("serial", "fifo"):
        tree = config(
            run={"name": mode, "iterations": 1, "seed": 3},
            cluster={"rollout_ranks": 1, "training_ranks": 2},
            pipeline={"mode": mode},
            training={"trajectories_per_step": 32, "optimizer": {"learning_rate": 1.0e-3, "clip_grad_norm": 1.0e9}},
        )
        train(tmp_path / mode, tree)
    orders = [arrival(tmp_path / mode) for mode in ("serial", "fifo")]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]), "nothing was shuffled: this test proves nothing"
    checkpoints = [str(tmp_path / mode / "checkpoints" / "iteration-000001") for mode in ("serial", "fifo")]
    run_mpi(1, "tests/job/gradients.py", str(tmp_path / "moments.json"), *checkpoints)
    found = json.loads((tmp_path / "moments.json").read_text())
    assert found["tensors"] > 5 and found["largest"] > 0, found
    assert found["difference"] <= 1e-5 * found["largest"], found  # 0 where a fast rollout left fifo the owners of serial


def test_fifo_streams_training_starts_before_the_rollout_ends(runs):
    streamed, serial = report(runs["fifo-2"])["iterations"], report(runs["serial-2"])["iterations"]
    assert any(i["first_dispatch_s"] < i["rollout_s"] for i in streamed), "of three short rollouts, on however busy a machine"
    assert all(i["first_dispatch_s"] >= i["rollout_s"] for i in serial)
    assert all(i["groups_trained"] == 8 and i["steps"] == 4 and i["trajectories"] == 32 for i in streamed + serial)


def test_both_replicas_train_and_never_the_same_trajectory(runs):
    done = [(c["replica"], s[0], x) for c in events(runs["fifo-2"], 1, "TrainMicroBatch") for s in _slices(c) for x in s[1]]
    assert {replica for replica, _, _ in done} == {0, 1}
    assert len(done) == len({(g, x) for _, g, x in done}) == 3 * 8 * 4


def _slices(command):
    return [(s["group"], s["samples"]) for s in command["slices"]]


@pytest.mark.parametrize("name", ["serial-1", "exact-2", "fifo-2"])
def test_replaying_a_log_gives_the_identical_commands(runs, name):
    settings = _config(runs[name])
    folder = runs[name] / "attempt-1" / "events"
    roll, history = RolloutCoordinator(rollout_settings(settings)), list(steps(folder / "rank00000.jsonl"))
    assert len(history) > 200
    for event, commands in history:
        assert roll.on(event) == commands
    learn, history = TrainingCoordinator(training_settings(settings)), list(steps(folder / "rank00001.jsonl"))
    assert len(history) > 40
    for event, commands in history:
        assert learn.on(event) == commands


def test_a_replay_under_another_policy_diverges(runs):
    tree = _config(runs["fifo-2"]).model_dump()
    tree["admission"]["frontier_groups"] = 3
    roll = RolloutCoordinator(rollout_settings(Config.model_validate(tree)))
    path = runs["fifo-2"] / "attempt-1" / "events" / "rank00000.jsonl"
    with pytest.raises(AssertionError):
        for event, commands in steps(path):
            assert roll.on(event) == commands


def _config(run_dir: Path) -> Config:
    from rpipe import config as configuration

    return configuration.load(run_dir / "config.yaml")


def test_a_run_goes_on_from_its_checkpoint_and_ends_where_an_uninterrupted_one_does(runs, tmp_path):
    tree = config(pipeline={"mode": "exact"}, admission={"policy": "frontier"})
    train(tmp_path / "run", tree, "run.iterations=2")
    train(tmp_path / "run", tree, "run.iterations=3")
    assert weights(tmp_path / "run") == weights(runs["exact-1"])
    assert [r["iteration"] for r in events(tmp_path / "run", 1, "TrainerReady", attempt=2)] == [2]
    found = report(tmp_path / "run")
    assert found["attempts"] == 2 and [i["iteration"] for i in found["iterations"]] == [0, 1, 2]


def test_over_a_channel_whose_sends_must_not_wait_groups_go_when_the_trainer_is_ready(tmp_path, monkeypatch):
    """As over NCCL: Ready first. The same groups, hence the same weights, as where they are sent at once."""
    tree = config(pipeline={"mode": "exact"}, run={"name": "test", "iterations": 2, "seed": 3})
    train(tmp_path / "patient", tree)
    hook, asked = tmp_path / "hook", tmp_path / "asked"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import os\n"
        "from rpipe.runtime.channel import Channel\n"
        "def patient(self):\n"
        f"    with open({str(asked)!r}, 'a') as file:\n"
        "        file.write(os.environ.get('OMPI_COMM_WORLD_RANK', '-'))\n"
        "    return False\n"
        "Channel.patient = property(patient)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(hook))
    train(tmp_path / "impatient", tree)
    assert sorted(asked.read_text()) == ["0"] * 16 + ["1"] * 16, "both sides ask once a group"
    assert weights(tmp_path / "impatient") == weights(tmp_path / "patient")

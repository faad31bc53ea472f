"""A simulated job: the same log for the same seed, commands that a replay gives again, figures that add up."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rpipe import config as configs
from rpipe.control.rollout import RolloutCoordinator
from rpipe.control.settings import rollout_settings, training_settings
from rpipe.control.training import TrainingCoordinator
from rpipe.core.eventlog import steps
from rpipe.sim.job import SimulatedJob
from rpipe.sim.run import Memory, simulate
from tests.sim.simulated import WORKLOAD, config, logs

ROOT = Path(__file__).resolve().parents[2]
AGENTS = {"environment": "somebody.s:environment", "max_turns": 4, "max_new_tokens": 400}
TOOLS = {"turns": 3, "turns_sigma": 0.5, "answer_tokens": 20, "tool_s": 0.05, "tool_sigma": 1.0}
MODES = [
    ("serial", {"pipeline": {"mode": "serial"}, "admission": {"policy": "fifo"}}),
    ("exact", {"pipeline": {"mode": "exact"}}),
    ("fifo", {"training": {"packing": "global"}}),
    ("filtered, evaluated", {"rollout": {"filter": "zero_variance"}, "evaluation": {"every_iterations": 1}}),
    ("cut by deadlines", {"rollout": {"trajectory_deadline_s": 0.2}}),
    ("short of KV cache", {"engine": {"kv_tokens": 300}, "workload": {"median_tokens": 95, "sigma": 0.2}}),
    ("agents", {"rollout": AGENTS, "reward": {"workers": 3}, "workload": {"agents": TOOLS}}),
    (
        "agents, engines lost",
        {
            "rollout": AGENTS | {"trajectory_deadline_s": 1.0},
            "workload": {"agents": TOOLS},
            "hardware": {"lost_engines": {0: 0.4, 1: 0.9}, "engine_start_s": 0.7},
            "evaluation": {"every_iterations": 1},
        },
    ),
    ("engines lost", {"hardware": {"lost_engines": {0: 0.4, 1: 0.9}, "engine_start_s": 0.7}}),
]


def changed(sections):
    """Into the small job's own sections."""
    base = config().model_dump(mode="json")
    return configs.parse({**base, **{name: {**base[name], **section} for name, section in sections.items()}}, "test")


@pytest.mark.parametrize("sections", [s for _, s in MODES], ids=[name for name, _ in MODES])
def test_a_replay_of_a_simulated_log_gives_the_same_commands(sections, tmp_path):
    settings = changed(sections)
    result = simulate(settings, tmp_path / "run")
    assert len(result.iterations) == 2
    assert all(row["trajectories"] == 48 for row in result.iterations)
    again = configs.load(tmp_path / "run" / "config.yaml")
    assert again == settings
    for path, coordinator in zip(
        logs(tmp_path / "run"), (RolloutCoordinator(rollout_settings(again)), TrainingCoordinator(training_settings(again)))
    ):
        for number, (event, commands) in enumerate(steps(path)):
            assert coordinator.on(event) == commands, f"{path.name}, event {number}: {event}"
        assert coordinator.done


def test_deadlines_full_caches_and_lost_engines_do_happen_there():
    def kinds(name):
        log = Memory()
        SimulatedJob(changed(dict(MODES)[name]), log, Memory()).run()
        return Counter(type(body).__name__ for _, _, body in log.kept)

    assert kinds("cut by deadlines")["AbortTurn"] > 5
    assert kinds("engines lost")["EngineRestarted"] == 2
    assert simulate(changed(dict(MODES)["short of KV cache"])).retractions > 0
    assert kinds("filtered, evaluated")["DropGroup"] > 0


def test_two_simulations_of_one_seed_give_the_same_log_and_of_another_seed_another(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        simulate(changed({"run": {"seed": seed}}), tmp_path / name)
    a, b, c = ([path.read_bytes() for path in logs(tmp_path / name)] for name in "abc")
    assert a == b and a != c


def test_in_memory_and_on_disk_tell_the_same_figures(tmp_path):
    assert simulate(config()).iterations == simulate(config(), tmp_path / "run").iterations


def test_streaming_hides_training_and_changes_neither_lengths_nor_compute():
    serial = simulate(changed({"pipeline": {"mode": "serial"}, "admission": {"policy": "fifo"}})).medians
    streamed = simulate(changed({})).medians
    assert streamed["generated_tokens"] == serial["generated_tokens"]
    assert streamed["train_busy_s"] == pytest.approx(serial["train_busy_s"], rel=0.15)
    assert streamed["first_dispatch_s"] < 0.6 * serial["first_dispatch_s"]
    assert serial["rollout_to_train_end_s"] == pytest.approx(serial["rollout_s"] + serial["train_busy_s"], rel=0.1)


def test_a_replayed_run_has_the_lengths_and_rewards_of_the_first(tmp_path):
    first = simulate(config(), tmp_path / "first")
    replay = {"lengths": "run", "path": str(tmp_path / "first"), "median_tokens": 5}
    again = simulate(changed({"workload": {**WORKLOAD, **replay}, "run": {"seed": 77}}))
    same = ("generated_tokens", "reward_mean", "rollout_to_train_end_s")
    assert [[row[key] for key in same] for row in again.iterations] == [[row[key] for key in same] for row in first.iterations]


def test_a_slow_engine_slows_the_rollout():
    slow = changed({"hardware": {**config().hardware.model_dump(mode="json"), "slow_engines": {1: 4.0}}})
    assert simulate(slow).medians["rollout_s"] > 1.3 * simulate(config()).medians["rollout_s"]


def test_engines_and_trainer_on_the_same_cores_slow_each_other():
    shared = {**config().hardware.model_dump(mode="json"), "host": {"cores": 2, "engine_cores": 1.0, "trainer_cores": 1.0}}
    assert simulate(changed({"hardware": shared})).medians["rollout_s"] > 1.1 * simulate(config()).medians["rollout_s"]


def test_a_pipeline_trains_as_its_schedule_says():
    trainer = {"micro_batch_s": 0.0, "token_s": 1e-3, "step_s": 0.0}
    hardware = {"trainer": trainer}
    one, two = (
        simulate(config(training={"pp": pp, "packing": "global"}, pipeline={"mode": "serial"}, hardware=hardware)).medians
        for pp in (1, 2)
    )
    tokens = one["train_busy_s"] * 2 / 1e-3  # two replicas; the pipeline is one
    assert two["pipeline_bubble"] and 0.1 < two["pipeline_bubble"] < 0.5
    useful_s = two["train_busy_s"] * (1 - two["pipeline_bubble"]) * 2
    assert useful_s == pytest.approx(tokens * 1e-3, rel=0.1), "without its bubble: the work of two replicas"


def test_simulating_imports_no_torch_and_no_mpi():
    code = (
        "import sys, rpipe.simulate, rpipe.report\n"
        "found = {'torch', 'mpi4py', 'megatron', 'matplotlib'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rpipe.cli", "simulate", *words], capture_output=True, text=True, cwd=ROOT)


def test_the_command_writes_a_run_that_the_report_reads(tmp_path):
    done = command("configs/sim/reasoning-14b-a800.yaml", "run.iterations=1", f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert "UNCALIBRATED" in done.stdout and "1 iteration in" in done.stdout
    assert (tmp_path / "run" / "report.json").exists()
    again = command("configs/sim/reasoning-14b-a800.yaml", f"run.dir={tmp_path / 'run'}")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1) and "holds a run" in again.stderr


@pytest.mark.parametrize(
    "override, words",
    [
        ("hardware=null", "hardware: missing; wanted: include one of configs/cluster/*.yaml"),
        ("workload=null", "workload: missing"),
        ("workload.lengths=run", "workload lengths run wants path"),
        ("workload.path=nowhere workload.lengths=run", "nowhere: no such directory"),
        ("model.shape=null", "Qwen3-14B/config.json: cannot be read"),
        ("engine.tp=1 model.shape.parameters=90000000000", "leave no room for KV cache"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(override, words, tmp_path):
    done = command("configs/sim/reasoning-14b-a800.yaml", *override.split(), f"run.dir={tmp_path / 'run'}")
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sim").glob("*.yaml")), ids=lambda p: p.name)
def test_every_committed_simulation_runs(path):
    assert len(simulate(configs.load(path, ["run.iterations=1", "evaluation.prompts=0"])).iterations) == 1

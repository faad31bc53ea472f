"""A plan is as short as the best of all plans, says why the others are not, and is a run file that can be simulated."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from rpipe import config as configs
from rpipe.config import ConfigError
from rpipe.plan import main, told
from rpipe.sim.judge import Judge
from rpipe.sim.layouts import Engines, keys_of
from rpipe.sim.memory import engine_memory, trainer_memory
from rpipe.sim.plan_space import space_of
from rpipe.sim.planner import exhaustive, plan
from rpipe.sim.run import simulate
from rpipe.sim.shape import shape_of

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "sim" / "reasoning-14b-a800.yaml"
SMALL = [  # Qwen3-1.7B, 8 groups of 4 short responses
    "model.shape.parameters=1720000000",
    "model.shape.layers=28",
    "model.shape.hidden_size=2048",
    "rollout.groups_per_iteration=8",
    "rollout.trajectories_per_group=4",
    "rollout.max_new_tokens=2048",
    "training.trajectories_per_step=8",
    "training.micro_batch_tokens=4096",
    "training.tp=1",
    "engine.max_running=8",
    "run.iterations=1",
]
SETTINGS = {
    "streamed": [],
    "trainer-bound": ["hardware.accelerator.training_efficiency=0.04"],
    "rollout-bound, crowded": ["engine.max_running=4", "hardware.accelerator.training_efficiency=1.0"],
    "serial": ["pipeline.mode=serial", "admission.policy=fifo"],
    "exact": ["pipeline.mode=exact", "training.packing=group"],
    "soft frontier": ["admission.policy=soft_frontier"],
    "soft frontier that finds its width": ["admission.policy=soft_frontier", "admission.frontier_groups=auto"],
    "over-sampled": [
        "rollout.filter=zero_variance",
        "rollout.over_sampling=1.5",
        "rollout.refill_groups=4",
        "workload.reward_mean=0.3",
    ],
    "filtered": ["rollout.filter=zero_variance", "workload.reward_mean=0.2"],
    "experts": ["model.shape.experts=64", "model.shape.experts_per_token=4", "model.shape.active_parameters=400000000"],
    "speculating": ["workload.speculation={accepted_tokens: 2.5, step_cost: 1.2, max_running: 3}"],
    "measured": [
        "hardware.engine={decode_step_s: [[1, 0.01], [4, 0.012], [8, 0.02]], context_token_s: 1.0e-7}",
        "hardware.trainer={micro_batch_s: 0.1, token_s: 1.0e-4, step_s: 0.5}",
        "engine.tp=1",
    ],
}


def small(*overrides: str) -> configs.Config:
    return configs.load(CONFIG, [*SMALL, *overrides])


@pytest.mark.parametrize("overrides", SETTINGS.values(), ids=SETTINGS)
def test_a_plan_is_within_five_percent_of_the_best_and_no_plan_beats_its_bound(overrides):
    config = small(*overrides)
    judge, everything = exhaustive(config, 6, iterations=1)
    found = plan(config, 6, iterations=1)
    best_s = everything[0][1].iteration_s
    assert found.best[0][1].iteration_s <= 1.05 * best_s
    assert found.bound_s <= best_s
    for candidate, figures in everything:
        assert judge.bounds.iteration_s(candidate) <= figures.iteration_s * (1 + 1e-9), candidate


@pytest.mark.timeout(240)
def test_sixteen_accelerators_that_train_slowly_are_planned_within_five_percent_from_good_estimates():
    config = small(*SETTINGS["trainer-bound"])
    judge, everything = exhaustive(config, 16, iterations=1)
    assert plan(config, 16, iterations=1).best[0][1].iteration_s <= 1.05 * everything[0][1].iteration_s
    errors = [abs(judge.estimate_s(candidate) / figures.iteration_s - 1) for candidate, figures in everything]
    assert len(everything) > 500 and statistics.median(errors) < 0.02 and max(errors) < 0.3


def test_a_part_of_a_large_rollout_takes_about_as_long_as_the_whole(monkeypatch):
    large = ["rollout.groups_per_iteration=128", "rollout.trajectories_per_group=8", "training.trajectories_per_step=128"]
    parted = Judge(small(*large, "engine.max_running=16"), 16, 1)
    choices = [(Engines(8, 1), 8), (Engines(12, 1), 64), (Engines(8, 2), 128), (Engines(7, 1), 24)]
    assert [parted.part(*choice) for choice in choices] == [2, 3, 2, 3]
    monkeypatch.setattr("rpipe.sim.judge.SMALL", 10**9)
    whole = Judge(small(*large, "engine.max_running=16"), 16, 1)
    for choice in choices:
        found, wanted = parted.arrivals(*choice), whole.arrivals(*choice)
        assert sorted(order for _, order, _ in found) == sorted(order for _, order, _ in wanted) == list(range(128))
        for quantile in (63, 127):
            assert sorted(found)[quantile][0] == pytest.approx(sorted(wanted)[quantile][0], rel=0.15)


def test_every_plan_is_shown_or_counted_and_most_are_not_simulated():
    config = small()
    found = plan(config, 16, iterations=1)
    plans = sum(1 for _ in found.space.plans())
    assert plans == len(found.best) + sum(n for reason, n in found.pruned.items() if reason.startswith("search:"))
    assert found.rollouts + found.wholes < plans / 3


def test_the_same_config_gives_the_same_plans():
    first, again = (plan(small(), 8, iterations=2) for _ in range(2))
    assert (first.best, first.pruned, first.rollouts, first.wholes) == (again.best, again.pruned, again.rollouts, again.wholes)


def test_a_plan_s_figures_are_those_of_a_simulation_of_its_config():
    config = small()
    (best, figures) = plan(config, 8, iterations=2).best[0]
    overrides = [f"{key}={value}" for key, value in keys_of(best).items()]
    rows = simulate(small(*overrides, "run.iterations=2", "evaluation.prompts=0")).iterations
    assert figures.rollout_s == pytest.approx(sum(row["rollout_s"] for row in rows) / 2)
    assert figures.iteration_s - figures.publish_s == pytest.approx(sum(row["rollout_to_train_end_s"] for row in rows) / 2)


def test_the_slower_stage_gets_the_accelerators():
    def training(token_s):
        measured = f"hardware.trainer={{micro_batch_s: 0.01, token_s: {token_s}, step_s: 0.01}}"
        return plan(small(measured, "hardware.publish_engine_s=0"), 8, 1).best[0][0].trainer.ranks

    assert training(2.0e-3) >= 5 > 3 >= training(1.0e-5)


def test_a_plan_for_long_tails_uses_wider_engines_than_one_for_crowds():
    shared = ["training.micro_batch_tokens=4096", "rollout.max_new_tokens=4096", "rollout.trajectories_per_group=4"]
    tail = [*shared, "rollout.groups_per_iteration=2", "training.trajectories_per_step=8", "engine.max_running=8"]
    crowd = [*shared, "rollout.groups_per_iteration=64", "workload.quantiles=[[0, 400], [1, 401]]"]
    wide, narrow = (plan(configs.load(CONFIG, chosen), 16, 1).best[0][0].engines.tp for chosen in (tail, crowd))
    assert wide > narrow


def test_no_engine_and_no_tensor_parallel_group_lies_on_two_nodes():
    space = space_of(small(), 12)
    for engines, trainer in space.pairs():
        at, groups = engines.ranks, trainer.ranks // trainer.tp
        for _ in range(groups):  # ranks sit one after another; a group that would not fit begins the next node
            at += -at % 8 if at % 8 + trainer.tp > 8 else 0
            assert at + trainer.tp <= 12, (engines, trainer)
            at += trainer.tp
    assert space.pruned["split: an engine or a tensor-parallel group would lie on two nodes"]


def test_what_cannot_fit_is_pruned_by_the_memory_it_needs():
    space = space_of(configs.load(CONFIG, ["training.micro_batch_tokens=4096", "rollout.max_new_tokens=4096"]), 16)
    assert all(memory.total <= 76e9 for memory in space.memory.values())
    assert {t for found in space.trainers.values() for t in found} <= set(space.memory)
    assert space.pruned["trainer: weights, gradients and optimizer do not fit into 76 GB"] > 10
    with pytest.raises(ConfigError, match=r"no layout of a trainer can run: .*activations do not fit"):
        space_of(small("data.max_prompt_tokens=10000000"), 16)
    with pytest.raises(ConfigError, match="no layout of engines can run: tp 1 leaves no room for KV cache"):
        space_of(configs.load(CONFIG, ["model.shape.parameters=900000000000"]), 16)


def test_the_memory_of_a_14b_model_is_what_arithmetic_says():
    config = configs.load(CONFIG, ["model.shape.vocabulary=0"])  # tp 4, two replicas, bfloat16
    memory, parameters = trainer_memory(config, shape_of(config)), 14_770_000_000
    assert memory.weights == 2 * parameters / 4
    assert memory.gradients == 4 * parameters / 4
    assert memory.optimizer == 12 * parameters / 4 / 2
    pinned = configs.load(CONFIG, ["model.shape.vocabulary=0", "pipeline.old_logprob=pinned"])
    assert trainer_memory(pinned, shape_of(pinned)).total - memory.total == 2 * parameters / 4
    engine = engine_memory(config, shape_of(config), kv_tokens=1000)  # tp 2
    assert engine.weights == parameters and engine.kv_cache == 1000 * 2 * 40 * 4 * 128 * 2


def test_measured_hardware_keeps_the_layout_it_was_measured_with():
    space = space_of(small(*SETTINGS["measured"]), 4)
    assert {e.tp for e in space.engines} == {1} and Engines(3, 1) in space.engines
    assert {t.lockstep for found in space.trainers.values() for t in found} == {1}
    assert isinstance(space.pruned, Counter) and any("measured" in reason for reason in space.pruned)


def test_a_trace_is_planned_for_as_many_iterations_as_it_holds(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"group": g, "sample": s, "output_tokens": 100 + 40 * g + 300 * s} for g in range(16) for s in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = plan(small("workload.lengths=trace", f"workload.path={trace}"), 4, iterations=3)
    assert found.iterations == 2 and found.best[0][1].generated_tokens == sum(row["output_tokens"] for row in rows) / 2


def test_what_a_deadline_would_cut_is_told_and_not_planned_with():
    config = small("rollout.trajectory_deadline_s=4")
    found = plan(config, 4, iterations=1)
    assert found.cut > 0.05 and plan(small(), 4, iterations=1).cut == 0
    assert found.best == plan(small(), 4, iterations=1).best
    assert "would cut" in told(config, found, 1.0)


def test_stages_on_two_kinds_of_accelerators_keep_their_split():
    kinds = yaml.safe_load((ROOT / "configs" / "cluster" / "a100.yaml").read_text())["hardware"]["accelerator"]
    other = f"hardware.training_accelerator={json.dumps({**kinds, 'memory_bytes': 48_000_000_000})}"
    config = small(other, "cluster.rollout_ranks=2", "cluster.training_ranks=8")
    found = plan(config, 10, iterations=1)
    assert {(p.engines.ranks, p.trainer.ranks) for p in found.space.plans()} == {(2, 8)}
    assert {p.engines.tp for p in found.space.plans()} == {1, 2} and found.own is not None
    with pytest.raises(ConfigError, match=r"--accelerators 12: .* the split stays; wanted: 10"):
        space_of(config, 12)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rpipe.cli", "plan", *words], capture_output=True, text=True, cwd=ROOT)


def test_the_command_tells_ten_plans_and_writes_a_run_file_of_the_best(tmp_path):
    out = tmp_path / "mine.yaml"
    done = command(str(CONFIG), "--accelerators", "6", *SMALL, "--iterations", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "UNCALIBRATED" in done.stdout and "\n 10 " in done.stdout and "not chosen:" in done.stdout
    chosen = configs.load(out)
    best = done.stdout.split("best: ")[1].splitlines()[0]
    assert chosen == small(*best.split()) and chosen.cluster.rollout_ranks + chosen.cluster.training_ranks == 6


def test_the_command_prints_json_and_compares_with_the_config_s_own_plan():
    own = ["cluster.rollout_ranks=1", "cluster.training_ranks=3", "engine.tp=1", "admission.frontier_groups=1"]
    done = command(str(CONFIG), *SMALL, *own, "--json", "--iterations", "1")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["accelerators"] == 4 and told["own"]["keys"]["admission.frontier_groups"] == 1
    assert told["plans"][0]["iteration_s"] < told["own"]["iteration_s"]
    assert {"rollout_s", "train_busy_s", "waiting_s", "trainer_bytes", "kv_tokens"} <= set(told["plans"][0])


@pytest.mark.parametrize(
    "words, told",
    [
        (["--accelerators", "1"], "--accelerators 1: one must roll out and one train"),
        (["--iterations", "0"], "--iterations 0; wanted: at least 1"),
        (["hardware=null"], "hardware: missing; wanted: include one of configs/cluster"),
        (["workload=null"], "workload: missing"),
        (["--out", "nowhere/mine.yaml"], "wanted: a file in a directory that exists"),
        (["--out", str(CONFIG)], "is the config that is planned"),
        (["workload.lengths=run", "workload.path=nowhere"], "nowhere: no such directory"),
        (["data.max_prompt_tokens=10000000"], "24 accelerators: no layout of a trainer can run"),
        (["engine.kv_tokens=900000000"], "does not hold weights and engine.kv_tokens"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(words, told, capsys):
    assert main([str(CONFIG), *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1, error


def test_planning_imports_no_torch_and_no_mpi():
    code = (
        "import sys, rpipe.plan\n"
        "found = {'torch', 'mpi4py', 'megatron', 'matplotlib'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

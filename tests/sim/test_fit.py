"""A profile fitted to simulated logs is the profile that made them, as far as logs can tell."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rpipe import config as configs
from rpipe.sim.fit_engine import fit_engine
from rpipe.sim.fit_trainer import fit_trainer
from rpipe.sim.observe import observe
from rpipe.sim.run import simulate
from rpipe.sim.shape import shape_of
from tests.sim.simulated import HARDWARE, config

ROOT = Path(__file__).resolve().parents[2]
TRUTH = {
    **HARDWARE,
    "engine": {"decode_step_s": [[1, 0.004], [8, 0.007], [32, 0.016]], "prefill_s": 0.012, "prefill_token_s": 5e-5},
    "trainer": {"micro_batch_s": 0.03, "trajectory_s": 0.002, "token_s": 1e-4, "step_s": 0.05},
    "host": {"cores": 2, "engine_cores": 1.0, "engine_token_s": 2e-4, "trainer_cores": 1.0},
    "publish_s": 0.2,
    "reward_s": 0.004,
}
SHAPE = {
    "cluster": {"rollout_ranks": 1, "training_ranks": 1},
    "rollout": {"groups_per_iteration": 24, "trajectories_per_group": 8, "max_new_tokens": 200},
    "engine": {"max_running": 32},
    "training": {"trajectories_per_step": 64, "micro_batch_tokens": 600, "packing": "global"},
    "evaluation": {"prompts": 0},
    "hardware": TRUTH,
    "workload": {"median_tokens": 30, "sigma": 0.8, "prompt_tokens": 8},
}


def made(folder: Path, name: str, **sections: dict[str, object]) -> Path:
    """A run dir with its cores on record."""
    base = config(**SHAPE).model_dump(mode="json")
    tree = {**base, **{key: {**base[key], **section} for key, section in sections.items()}}
    simulate(configs.parse(tree, name), folder / name)
    (folder / name / "environment.json").write_text(json.dumps({"cores": 2}))
    return folder / name


def serial(folder: Path, name: str, **sections: dict[str, object]) -> Path:
    return made(folder, name, pipeline={"mode": "serial"}, admission={"policy": "fifo"}, hardware={"host": None}, **sections)


def calibrate(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rpipe.cli", "calibrate", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        made(folder, "serial", pipeline={"mode": "serial"}, admission={"policy": "fifo"}),
        made(folder, "streamed", admission={"frontier_groups": 3}),
    ]
    done = calibrate(*runs, "--out", folder / "profile.yaml", "--name", "mine")
    assert done.returncode == 0, done.stderr
    return folder, yaml.safe_load((folder / "profile.yaml").read_text())["hardware"], done.stderr


def test_rates_are_found_again(fitted):
    _, profile, _ = fitted
    steps = dict(map(tuple, profile["engine"]["decode_step_s"]))
    assert profile["name"] == "mine" and not profile["calibrated"], "these runs were simulated"
    assert profile["fitted_parameters"] == shape_of(config()).parameters
    assert steps[1] == pytest.approx(0.004, rel=0.1)
    assert steps[8] == pytest.approx(0.007, rel=0.1)
    assert steps[32] == pytest.approx(0.016, rel=0.1)
    assert profile["trainer"]["token_s"] == pytest.approx(1e-4, rel=0.2)
    assert profile["trainer"]["step_s"] == pytest.approx(0.05, rel=0.05)
    assert profile["host"]["engine_token_s"] == pytest.approx(2e-4, rel=0.3)
    assert profile["host"]["engine_weight"] == pytest.approx(1.0, rel=0.15)
    assert profile["publish_s"] == pytest.approx(0.2, rel=0.02)
    assert profile["reward_s"] == pytest.approx(0.004, rel=0.02)


def test_a_job_of_another_shape_is_predicted(fitted):
    folder, profile, _ = fitted
    other = {"admission": {"frontier_groups": 6}, "engine": {"max_running": 12}, "training": {"trajectories_per_step": 32}}
    truth = made(folder, "other", **other)
    tree = configs.load(truth / "config.yaml").model_dump(mode="json")
    workload = {"lengths": "run", "path": str(truth)}
    twin = simulate(configs.parse({**tree, "hardware": profile, "workload": workload}, "twin")).medians
    real = simulate(configs.load(truth / "config.yaml")).medians
    for key in ("rollout_to_train_end_s", "first_dispatch_s", "rollout_s"):
        assert twin[key] == pytest.approx(real[key], rel=0.05), key


def test_the_costs_of_a_micro_batch_are_found_behind_a_pipeline_s_schedule(tmp_path):
    cut = {"training": {"pp": 2, "micro_batch_tokens": 300}, "cluster": {"training_ranks": 2}}
    found = fit_trainer(observe(serial(tmp_path, "pipeline", **cut)), sharing=False)
    assert (found.micro_batch_s, found.trajectory_s, found.token_s) == pytest.approx((0.03, 0.002, 1e-4), rel=0.1)


def test_prefill_is_found_where_prompts_vary_in_length(tmp_path):
    draw = random.Random(0)
    with open(tmp_path / "trace.jsonl", "w") as file:
        for group in range(48):
            prompt_tokens = round(math.exp(draw.uniform(math.log(8), math.log(800))))
            for sample in range(8):
                output_tokens = min(max(round(draw.lognormvariate(math.log(30), 0.8)), 2), 200)
                row = {"group": group, "sample": sample, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
                print(json.dumps(row), file=file)
    workload = {"lengths": "trace", "path": str(tmp_path / "trace.jsonl")}
    found = fit_engine(observe(serial(tmp_path, "varied", workload=workload, engine={"kv_tokens": 200_000})), 1.0)
    assert found.tells_prefill_tokens
    assert found.prefill_token_s == pytest.approx(5e-5, rel=0.25)
    assert found.prefill_s == pytest.approx(0.012, rel=0.15)


def test_where_prompts_are_alike_no_cost_of_their_tokens_is_made_up_and_calibrate_says_so(fitted):
    _, profile, told = fitted
    assert profile["engine"]["prefill_token_s"] == 0.0
    assert profile["engine"]["prefill_s"] == pytest.approx(0.012, rel=0.25), "the whole of a prefill"
    assert "prefill_token_s = 0 is assumed: most prompts have 8 to 8 tokens" in told
    assert "publish_engine_s = publish_s / 3 is assumed" in told


def test_runs_that_cannot_share_a_profile_are_refused(fitted, tmp_path):
    folder, _, told = fitted
    assert "responses explained to" in told
    other = made(folder, "two-wide", cluster={"rollout_ranks": 2}, engine={"tp": 2})
    done = calibrate(folder / "serial", other)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "engine.tp = 2" in done.stderr
    larger = made(folder, "larger", model={"make": {"layers": 8}})
    done = calibrate(folder / "serial", larger)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "wanted: runs of one model" in done.stderr


def test_a_run_without_responses_is_refused(tmp_path):
    (tmp_path / "attempt-1" / "events").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(configs.dump(config()))
    done = calibrate(tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "0 micro-batches" in done.stderr

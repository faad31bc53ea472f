"""A profile that was fitted to one model is not called calibrated for another: simulate, plan and the report say so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rpipe import config as configs
from rpipe.analysis.summary import report
from rpipe.plan import as_json, told
from rpipe.sim.calibration import calibrated, described, objection
from rpipe.sim.planner import plan
from rpipe.sim.run import simulate
from rpipe.sim.shape import shape_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FITTED = CONFIGS / "quickstart.yaml"  # on configs/cluster/cpu.yaml, which was fitted to its model
OTHER = CONFIGS / "smollm2-sums.yaml"  # on the same profile
SHORT = ["run.iterations=1", "evaluation.prompts=0", "workload.median_tokens=8", "rollout.max_new_tokens=16"]


def test_a_profile_counts_for_the_model_that_it_was_fitted_to():
    config = configs.load(FITTED)
    assert config.hardware is not None and config.hardware.fitted_parameters == shape_of(config).parameters
    assert calibrated(config) and objection(config) == "" and described(config).startswith("cpu (calibrated: ")


@pytest.mark.parametrize(("layers", "counts"), [(4, True), (5, False), (3, False)])
def test_a_model_of_another_size_is_told_with_both_sizes(layers, counts):
    config = configs.load(FITTED, [f"model.make.layers={layers}"])
    assert calibrated(config) == counts
    if not counts:
        assert "800,768 parameters" in objection(config) and f"has {shape_of(config).parameters:,}" in objection(config)
        assert "\n" not in objection(config)


def test_a_size_that_nothing_says_does_not_count():
    assert "hardware.fitted_parameters" in objection(configs.load(FITTED, ["hardware.fitted_parameters=null"]))
    unread = configs.load(FITTED, ["model.make=null", "model.gguf=x.gguf"])
    assert not calibrated(unread) and "model.shape" in objection(unread)


def test_a_profile_that_nobody_fitted_is_uncalibrated_for_every_model():
    config = configs.load(CONFIGS / "sim" / "reasoning-14b-a800.yaml")
    assert not calibrated(config) and objection(config) == "" and "(UNCALIBRATED: " in described(config)


@pytest.mark.parametrize(("path", "counts"), [(FITTED, True), (OTHER, False)], ids=["fitted", "other"])
def test_the_report_of_a_simulated_run_says_whether_it_is_calibrated(tmp_path, path, counts):
    simulate(configs.load(path, [*SHORT, "rollout.groups_per_iteration=8"]), tmp_path)
    run = report(tmp_path, "x")["run"]
    assert run["calibrated"] is counts
    assert ("UNCALIBRATED for this model" in run["simulated"]) is not counts


def test_simulate_says_it_in_one_line(tmp_path):
    words = [str(OTHER), *SHORT, f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "rpipe.cli", "simulate", *words], capture_output=True, text=True, cwd=CONFIGS.parent, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("not calibrated: ")]
    assert len(lines) == 1 and "800,768 parameters" in lines[0] and "134,515,008" in lines[0]
    assert json.loads((tmp_path / "run" / "report.json").read_text())["run"]["calibrated"] is False


def test_plan_says_it_and_writes_it():
    config = configs.load(OTHER, SHORT)
    found = plan(config, 2, 1)
    assert objection(config) in told(config, found, 1.0).splitlines()
    assert as_json(config, found)["hardware"]["calibrated"] is False
    fitted = configs.load(FITTED, SHORT)
    assert as_json(fitted, plan(fitted, 2, 1))["hardware"]["calibrated"] is True

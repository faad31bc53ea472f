"""A publish costs more the more engines take it: simulated, planned and calibrated alike."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from rpipe import config as configs
from rpipe.sim.bounds import Bounds
from rpipe.sim.costs import publish_s
from rpipe.sim.fit import publish_line
from rpipe.sim.judge import Judge
from rpipe.sim.observe import observe
from rpipe.sim.planner import plan
from rpipe.sim.run import simulate
from tests.sim.simulated import HARDWARE, config

ROOT = Path(__file__).resolve().parents[2]
A800 = ROOT / "configs" / "sim" / "reasoning-14b-a800.yaml"
SMALL = ["rollout.groups_per_iteration=8", "rollout.trajectories_per_group=4", "training.trajectories_per_step=8"]


def test_one_engine_costs_the_fixed_part_and_the_weights_and_each_further_one_what_the_sender_needs():
    sheet = configs.load(A800)
    assert sheet.hardware is not None and sheet.hardware.accelerator is not None and sheet.model.shape is not None
    nbytes = 2 * sheet.model.shape.parameters
    assert publish_s(sheet, 1) == pytest.approx(sheet.hardware.publish_s + nbytes / sheet.hardware.publish_bytes_per_s)
    took_s = [publish_s(sheet, engines) for engines in range(1, 9)]
    more_s = [later - earlier for earlier, later in pairwise(took_s)]
    assert more_s == pytest.approx([nbytes / sheet.hardware.accelerator.network_bytes_per_s] * 7)
    assert max(more_s) < took_s[0], "engines load side by side"


@pytest.mark.parametrize(("said", "further_s"), [({}, 0.1), ({"publish_engine_s": 0.02}, 0.02)])
def test_where_all_is_measured_one_engine_costs_what_was_measured(said, further_s):
    made = config(hardware={**HARDWARE, "publish_s": 0.3, **said})
    assert publish_s(made, 1) == 0.3
    assert publish_s(made, 3) == pytest.approx(0.3 + 2 * further_s)


def of_engines(engines: int) -> configs.Config:
    hardware = {**HARDWARE, "publish_s": 0.3, "publish_engine_s": 0.05}
    engine = {"max_running": 24 // engines}
    return config(cluster={"rollout_ranks": engines}, engine=engine, hardware=hardware, evaluation={"prompts": 0})


def test_a_simulated_job_publishes_to_four_engines_for_longer_than_to_one_and_calibration_finds_both(tmp_path):
    seen = []
    for engines in (1, 4):
        simulate(of_engines(engines), tmp_path / str(engines))
        seen += observe(tmp_path / str(engines))
    one, four = (s.publishes for s in seen)
    assert {n for n, _ in one} == {1} and {n for n, _ in four} == {4}
    assert four[-1][1] - one[-1][1] == pytest.approx(3 * 0.05)
    message_s = 0.001  # on its way to the engine
    assert publish_line([*one, *four], message_s) == pytest.approx({"publish_s": 0.3, "publish_engine_s": 0.05}, rel=0.02)
    assert publish_line(one, message_s) == pytest.approx({"publish_s": 0.3}, rel=0.02)
    assert publish_line([(4, 0.6)], 0.0) == pytest.approx({"publish_s": 0.3}), "of one engine, as the simulator will grow it"


def test_plans_pay_for_their_engines_in_their_figures_and_in_their_bounds():
    loaded = configs.load(A800, [*SMALL, "hardware.publish_engine_s=100"])
    judge = Judge(loaded, loaded.cluster.rollout_ranks + loaded.cluster.training_ranks, 1)
    free = Bounds(Judge(configs.load(A800, SMALL), judge.space.accelerators, 1).space, judge.work)
    plans = {plan.engines.count: plan for plan in judge.space.plans()}
    counts = sorted(plans)
    assert len(counts) > 3
    for count in counts:
        extra_s = judge.bounds.iteration_s(plans[count]) - free.iteration_s(plans[count])
        sent_s = publish_s(configs.load(A800, SMALL), count)
        assert extra_s == pytest.approx(publish_s(loaded, count) - sent_s)
    few, many = (judge.whole(plans[count], 1) for count in (counts[0], counts[-1]))
    assert many.publish_s - few.publish_s == pytest.approx(100 * (counts[-1] - counts[0]))
    assert many.iteration_s > many.publish_s


def test_where_a_publish_is_dear_the_planner_takes_fewer_engines():
    alike = ["workload.quantiles=[[0, 400], [1, 401]]", "rollout.max_new_tokens=4096", "training.micro_batch_tokens=4096"]

    def engines(publish_engine_s: float) -> int:
        loaded = configs.load(A800, [*alike, f"hardware.publish_engine_s={publish_engine_s}"])
        return plan(loaded, 16, 1).best[0][0].engines.count

    assert engines(20.0) < engines(0.0)

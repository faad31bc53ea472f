"""On heavy-tailed lengths a hard frontier leaves engines empty: the diagnosis says so, and does not blame the long answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpipe import config as configs
from rpipe.analysis.collect import collect
from rpipe.analysis.diagnosis import Diagnosis, diagnose
from rpipe.analysis.run import read
from rpipe.sim.run import simulate

SWEEP = Path(__file__).resolve().parents[2] / "configs" / "sim" / "sweep-base.yaml"
FIFO = ("admission.policy=fifo",)


def diagnosed(run_dir: Path, *overrides: str) -> Diagnosis:
    simulate(configs.load(SWEEP, ["run.iterations=1", "evaluation.prompts=0", *overrides]), run_dir)
    details, _ = collect(read(run_dir / "attempt-1"))
    (told,) = [told for detail in details if (told := diagnose(detail)) is not None]
    return told


@pytest.mark.parametrize("width", [1, 2])
def test_a_frontier_that_starves_engines_is_blamed_and_not_the_stragglers_behind_it(tmp_path, width):
    """8 or 16 trajectories in flight, where 128 could run."""
    narrow = diagnosed(tmp_path / "narrow", f"admission.frontier_groups={width}")
    assert narrow.findings[0].cause == "narrow frontier"
    assert narrow.seconds["narrow frontier"] > 3 * narrow.seconds.get("straggler", 0.0)
    assert f"at most {width} groups were in service" in narrow.sentence
    gained_s = narrow.whole_s - diagnosed(tmp_path / "wide", *FIFO).whole_s
    assert gained_s > 0.5 * narrow.seconds["narrow frontier"], "what is blamed is what a wider frontier brings"


def test_without_deferral_a_straggler_keeps_its_name(tmp_path):
    """Every trajectory runs at once, from the start: what is waited for is the tail."""
    told = diagnosed(tmp_path, *FIFO, "engine.max_running=128")
    assert "narrow frontier" not in told.seconds
    assert told.findings[0].cause == "straggler"


def test_a_soft_frontier_that_fills_the_engines_leaves_stragglers_their_name(tmp_path):
    told = diagnosed(tmp_path, "admission.policy=soft_frontier", "hardware.trainer.token_s=1.0e-6")
    assert told.findings[0].cause == "straggler"
    assert told.seconds["straggler"] > 3 * told.seconds.get("narrow frontier", 0.0)

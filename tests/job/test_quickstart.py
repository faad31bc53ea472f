"""The quickstart as committed: does it learn, and is it done in time?"""

from __future__ import annotations

import time

import pytest

from tests.bench.jobs import run
from tests.bench.learning import RISE

LIMIT_S = 360  # the README promises 240 on a quiet machine; CI machines are noisy


@pytest.mark.timeout(600)
def test_the_quickstart_s_held_out_reward_rises_within_its_time(tmp_path):
    began = time.monotonic()
    report = run("configs/quickstart.yaml", tmp_path / "run")
    took_s = time.monotonic() - began
    first, last = (report["evaluations"][i]["reward_mean"] for i in (0, -1))
    assert last - first >= RISE, report["evaluations"]
    assert took_s < LIMIT_S
    assert len(report["iterations"]) == 80 and report["run"]["skipped_steps"] == 0

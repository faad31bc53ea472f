"""Does the trainer compute on a CUDA device what it computes on the CPU? Skipped where there is none.

    python -m pytest tests/gpu -s          prints the table of docs/training.md

One device, one process a scenario, no CPU shim: megatron-core with Transformer Engine where it is installed, else torch's own
attention. NCCL is initialised and meets in every reduction. NOT YET RUN BY US: no CUDA machine was to be had.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.job.mpi import ROOT

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


def run(scenario: str, folder: Path, accelerator: str = "cuda") -> Any:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if accelerator == "cpu" else {}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.trainer_worker", scenario, str(folder), accelerator],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **hidden},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("MEASURED ")]
    return json.loads(line.removeprefix("MEASURED "))


@pytest.fixture(scope="module")
def stepped(folder: Path) -> dict[str, Any]:
    return {accelerator: run("stepped", folder, accelerator) for accelerator in ("cpu", "cuda")}


@pytest.fixture(scope="module")
def large(folder: Path) -> dict[str, Any]:
    found = {scenario: run(scenario, folder) for scenario in ("large", "recompute", "offload")}
    for name, seen in found.items():
        print(f"\n{name:>10} {seen['tokens_per_s']:8.0f} tokens/s, peak {seen['peak_bytes'] / 2**30:6.1f} GiB,", end="")
        print(f" estimated {seen['estimated_bytes'] / 2**30:6.1f} GiB")
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_steps_equal_the_cpu_s(stepped: dict[str, Any], dtype: str, tolerance: float) -> None:
    cpu, cuda = stepped["cpu"][dtype], stepped["cuda"][dtype]
    assert cuda["norms"] == pytest.approx(cpu["norms"], rel=tolerance)
    assert np.abs(np.array(cuda["logprobs"]) - np.array(cpu["logprobs"])).mean() < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_streamed_gradients_equal_one_big_batch(stepped: dict[str, Any], dtype: str, tolerance: float) -> None:
    assert stepped["cuda"][dtype]["streamed"] < tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_trainer_goes_on(stepped: dict[str, Any], dtype: str) -> None:
    assert stepped["cuda"][dtype]["resumed"] < 1e-6


def test_nccl_carries_the_reductions(stepped: dict[str, Any]) -> None:
    assert "nccl" in stepped["cuda"]["backend"]


def test_peak_memory_stays_within_the_estimate(large: dict[str, Any]) -> None:
    for name, seen in large.items():
        assert seen["peak_bytes"] < 1.15 * seen["estimated_bytes"], name


def test_recompute_and_offload_take_less_memory(large: dict[str, Any]) -> None:
    assert large["recompute"]["peak_bytes"] < large["large"]["peak_bytes"]
    assert large["offload"]["peak_bytes"] < large["large"]["peak_bytes"]


def test_an_offloaded_optimizer_lies_in_host_memory_whenever_a_step_may_begin(folder: Path) -> None:
    seen = run("offloaded", folder)
    assert len(seen) == 5 and set(map(tuple, seen.values())) == {("cpu",)}, seen

"""Would clusters of their size accept the shipped configs' jobs? sbatch --test-only and the ranks' plan; nothing is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpipe import config as configs
from rpipe.runtime import allocation
from rpipe.runtime.allocation import Component
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
A800 = ("-p", "paper", "--gpus-per-node=8")
ASCEND = ("-p", "ascend", "--gres=npu:8")


@pytest.mark.parametrize(
    "name, nodes, words, devices",
    [
        ("a800-6x8-qwen3-14b", 6, A800, 8),
        ("a800-6x8-qwen3-30b-a3b", 6, A800, 8),
        ("ascend-20x8-qwen3-14b", 20, ASCEND, None),
    ],
)
def test_slurm_would_take_the_job_and_its_ranks_fit(
    cluster: Cluster, name: str, nodes: int, words: tuple[str, ...], devices: int | None
) -> None:
    config = f"configs/{name}.yaml"
    command = ["sbatch", "--test-only", f"-N{nodes}", "--time=1-0", *words, "slurm/train.sbatch", config]
    told = cluster.run("ctl", command).stderr
    assert f"using {nodes * (192 if words is ASCEND else 128)} processors on nodes" in told, told
    names = tuple(f"p{number}" for number in range(1, nodes + 1))
    plan = allocation.plan(configs.load(ROOT / config), (Component(names, devices),))
    assert len(plan.seats) == nodes * 8 and "without work" not in plan.table()


def test_two_partitions_take_the_two_roles_of_a_heterogeneous_job(cluster: Cluster) -> None:
    small, big = ["-p", "all", "-N2", "--gpus-per-node=4"], ["-p", "paper", "-N4", "--gpus-per-node=8"]
    command = ["sbatch", "--test-only", *small, ":", *big, "slurm/train_hetjob.sbatch", "configs/quickstart.yaml"]
    assert cluster.run("ctl", command, check=False).returncode == 0


def test_more_devices_than_a_node_has_are_refused_by_slurm(cluster: Cluster) -> None:
    command = ["sbatch", "--test-only", "-N6", "-p", "paper", "--gpus-per-node=9", "slurm/train.sbatch", "x.yaml"]
    done = cluster.run("ctl", command, check=False)
    assert done.returncode == 1 and "node configuration is not available" in done.stderr

"""Is Slurm's environment read right, and are srun's words and the table what the plan says? No Slurm is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpipe import config as configs
from rpipe.runtime import allocation
from rpipe.runtime.allocation import Component
from rpipe.runtime.mpirun import LaunchError
from tests.job.jobs import config as tree


def config(**cluster: Any) -> configs.Config:
    return configs.parse(tree(cluster=cluster), "run.yaml")


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the real one: n[1-3] alone."""
    file = folder / "scontrol"
    file.write_text('#!/bin/sh\n[ "$3" = "n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_an_allocation_is_its_nodes_and_their_devices(tmp_path, monkeypatch):
    scontrol(tmp_path, monkeypatch)
    found = allocation.components({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "8"})
    assert found == (Component(("n1", "n2", "n3"), 8),)
    assert allocation.components({"SLURM_JOB_NODELIST": "n1"}) == (Component(("n1",), None),)


def test_a_heterogeneous_job_has_two_components(tmp_path, monkeypatch):
    scontrol(tmp_path, monkeypatch)
    env = {
        "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "r1", "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "r1", "SLURM_GPUS_PER_NODE_HET_GROUP_0": "l20:4",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-3]", "SLURM_GPUS_PER_NODE_HET_GROUP_1": "8",
    }  # fmt: skip
    assert allocation.components(env) == (Component(("r1",), 4), Component(("n1", "n2", "n3"), 8))
    with pytest.raises(LaunchError, match="has 3 components; wanted: 2"):
        allocation.components(env | {"SLURM_HET_SIZE": "3"})


def test_srun_is_told_every_ranks_node():
    plan = allocation.plan(config(rollout_ranks=1, training_ranks=2), (Component(("n1", "n2", "n3"), 8),))
    assert plan.srun_words(["python"]) == [
        "--overcommit", "--ntasks=3", "--distribution=arbitrary", "--nodelist=n1,n2,n3", "python",
    ]  # fmt: skip


def test_both_components_go_into_one_step_rollout_first():
    both = (Component(("r1",), None), Component(("t1", "t2"), None))
    plan = allocation.plan(config(rollout_ranks=1, training_ranks=2), both)
    words = " ".join(plan.srun_words(["python"]))
    assert words == (
        "--het-group=0 --overcommit --ntasks=1 --distribution=arbitrary --nodelist=r1 python"
        " : --het-group=1 --overcommit --ntasks=2 --distribution=arbitrary --nodelist=t1,t2 python"
    )


def test_the_table_says_where_every_engine_and_replica_is():
    plan = allocation.plan(config(rollout_ranks=2, training_ranks=2), (Component(("n1", "n2", "n3"), 8),))
    assert plan.table().splitlines() == [
        "node  ranks  devices  role      serves",
        "n1    0      0        rollout   engine 0",
        "n1    1      1        rollout   engine 1",
        "n2    2      0        training  replica 0",
        "n2    3      1        training  replica 1",
        "without work: n3",
    ]


def test_what_the_allocation_lacks_is_one_line():
    three = (Component(("n1", "n2", "n3"), 8),)
    with pytest.raises(LaunchError, match="do not fit on 3 nodes of 1 devices; wanted: sbatch --nodes=4"):
        allocation.plan(config(rollout_ranks=2, training_ranks=2, devices_per_node=1), three)
    with pytest.raises(LaunchError, match="= 16, but the allocation gives 8 a node; wanted: sbatch --gpus-per-node=16"):
        allocation.plan(config(accelerator="cuda", devices_per_node=16), three)
    with pytest.raises(LaunchError, match="how many devices has a node"):
        allocation.plan(config(accelerator="npu"), (Component(("n1",), None),))


def test_ranks_refuse_to_run_where_they_were_not_planned(tmp_path):
    plan = allocation.plan(config(rollout_ranks=1, training_ranks=2), (Component(("n1", "n2", "n3"), None),))
    plan.write(1, tmp_path / "seats.json")
    allocation.check(tmp_path / "seats.json", ["a", "b", "c"])
    allocation.check(tmp_path / "absent.json", ["a"])
    with pytest.raises(LaunchError, match="put ranks 0 and 1 on a and a, other than planned"):
        allocation.check(tmp_path / "seats.json", ["a", "a", "c"])

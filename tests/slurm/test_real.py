"""Does sbatch run the quickstart's kind of job, real SGLang and megatron-core, over several hosts as on one?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.job.jobs import config
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import HETJOB, Submitted

ITERATIONS = 2
VERSIONS = ITERATIONS + 1  # the trainer's weights are published before the first iteration, too
LIMIT_S = 280


def tree(rollout_ranks: int, training_ranks: int) -> dict[str, Any]:
    """The quickstart's model, task and policies, with less of everything."""
    return config(
        run={"iterations": ITERATIONS, "seed": 0},
        cluster={"rollout_ranks": rollout_ranks, "training_ranks": training_ranks},
        model={
            "make": {"hidden_size": 128, "intermediate_size": 384, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32},
            "warm_up": {"steps": 4, "sequences_per_step": 16},
        },
        data={
            "train": {"kind": "sums", "size": 200, "reward": "last_integer"},
            "held_out": {"kind": "sums", "size": 8, "seed": 1, "reward": "last_integer"},
        },
        evaluation={"prompts": 8},
        rollout={"groups_per_iteration": 8, "trajectories_per_group": 4, "max_new_tokens": 24},
        engine={"kind": "sglang", "options": {}, "kv_tokens": 8192, "max_running": 16, "stream_interval_tokens": 8},
        admission={"policy": "frontier", "frontier_groups": 4},
        training={"trajectories_per_step": 16, "packing": "global", "micro_batch_tokens": 2048},
        limits={"message_s": 120, "collective_s": 120, "start_s": 240},
    )


@pytest.fixture(scope="module")
def one_host(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    """The same ranks on one host: what the others are held against."""
    return Submitted(slurm, tmp_path_factory.mktemp("one"), tree(1, 2), "-N1").completes(LIMIT_S)


@pytest.mark.timeout(2 * LIMIT_S + 60)
@pytest.mark.parametrize(
    "words, script, ranks",
    [
        (["-N3"], "slurm/train.sbatch", (1, 2)),
        (["-N3"], "slurm/train.sbatch", (2, 1)),
        (["-N1", ":", "-N2"], HETJOB, (1, 2)),
    ],
    ids=["1 rollout + 2 training", "2 rollout + 1 training", "hetjob"],
)
def test_three_hosts_train_as_one_does(
    one_host: Submitted, cluster: Cluster, tmp_path: Path, words: list[str], script: str, ranks: tuple[int, int]
) -> None:
    rollout, training = ranks
    before = {name: cluster.received_bytes(name) for name in cluster.names}
    job = Submitted(cluster, tmp_path, tree(*ranks), *words, script=script).completes(LIMIT_S)
    received = {name: cluster.received_bytes(name) - was for name, was in before.items()}
    assert job.seats() == [("n1", "rollout"), ("n2", "rollout" if rollout == 2 else "training"), ("n3", "training")]

    weights = len(job.weights())  # fp32, as they are broadcast
    for name in ("n1", "n2")[:rollout]:
        assert received[name] > VERSIONS * weights, received  # every version reached every engine's host
    for name in ("n2", "n3")[: training if training == 2 else 0]:
        assert received[name] > ITERATIONS * 2 * weights, received  # gradients of two steps an iteration

    assert job.kinds() == one_host.kinds()
    mine, theirs = job.report(), one_host.report()
    assert mine.keys() == theirs.keys()
    for iteration, other in zip(mine["iterations"], theirs["iterations"], strict=True):
        assert iteration.keys() == other.keys()
        assert {k: iteration[k] for k in ("iteration", "steps", "groups_trained", "trajectories")} == {
            k: other[k] for k in ("iteration", "steps", "groups_trained", "trajectories")
        }
        assert 0 < iteration["logprob_gap_max"] < 1e-4  # the engines hold the trainer's weights
        assert 0 <= iteration["reward_mean"] <= 1
    assert [(e["iteration"], e["count"]) for e in mine["evaluations"]] == [(0, 8), (ITERATIONS, 8)]
    assert {e["engine"] for e in job.events(0, "TurnFinished")} == set(range(rollout))

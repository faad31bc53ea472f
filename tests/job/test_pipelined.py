"""A pipeline-parallel trainer that is fed while the rollout runs: what is ready goes in one schedule."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.job.jobs import config, events, report, train, weights


@pytest.mark.timeout(300)
def test_a_two_stage_pipeline_trains_every_trajectory_once_with_small_bubbles(tmp_path):
    tree = config(
        run={"iterations": 2, "seed": 3},
        cluster={"rollout_ranks": 1, "training_ranks": 2},
        training={"pp": 2, "packing": "global", "trajectories_per_step": 16},
        admission={"policy": "soft_frontier"},
    )
    train(tmp_path / "run", tree)
    calls = events(tmp_path / "run", 1, "TrainMicroBatch")
    trained = Counter((s["group"], sample) for c in calls for s in c["slices"] for sample in s["samples"])
    assert trained == Counter({(group, sample): 1 for group in range(16) for sample in range(4)})
    assert all(sum(c["cuts"]) == sum(len(s["samples"]) for s in c["slices"]) for c in calls if c["cuts"])
    found = report(tmp_path / "run")["iterations"]
    assert [i["steps"] for i in found] == [2, 2]
    assert all(0 < i["pipeline_bubble"] <= 1 / 3 + 1e-9 for i in found), "two stages idle half the time when fed one by one"


@pytest.mark.timeout(300)
def test_a_pipeline_that_is_fed_group_by_group_ends_bit_equal_to_serial_with_small_bubbles(tmp_path):
    for mode, policy in (("serial", "fifo"), ("exact", "frontier")):
        tree = config(
            run={"iterations": 1, "seed": 3},
            cluster={"rollout_ranks": 1, "training_ranks": 2},
            pipeline={"mode": mode},
            training={"pp": 2, "trajectories_per_step": 16, "optimizer": {"learning_rate": 1.0e-3}},
            admission={"policy": policy},
        )
        train(tmp_path / mode, tree)
    assert weights(tmp_path / "exact") == weights(tmp_path / "serial")
    found = report(tmp_path / "exact")["iterations"]
    assert all(0 < i["pipeline_bubble"] <= 1 / 3 + 1e-9 for i in found), "no group of four is one micro-batch"

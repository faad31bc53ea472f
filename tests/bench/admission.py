"""Where does a hard frontier hurt, and does the soft one? Simulated: no engine, no trainer, the very coordinators.

    python -m tests.bench.admission

A small model, tokens slow down with the batch: K = 8, U = 2, one engine of 32 slots whose decode curve was measured here (0.9
M parameters), log-normal lengths (median 60, sigma 0.7, correlation of siblings 0.3); training costs so much a token that it
takes 1.5, 1 and 0.5 times as long as rollout.
Heavy tails, tokens hardly slow down with the batch: configs/sim/sweep-base.yaml (reasoning on A100 nodes), training 4, 2, 1 and
0.5 times as slow. F_w is U for the hard frontier and `auto` for the soft one.
Means over three seeds, and the iterations but the first: it has no measured rates.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

from rpipe import config
from rpipe.config import Config
from rpipe.sim.run import simulate
from tests.bench.sweeps import BASE, SPEED

TOKEN_S = {"1.5 x": 0.00055, "1 x": 0.00033, "0.5 x": 0.00015}
POLICIES = ("fifo", "frontier", "soft_frontier")
SEEDS = (0, 1, 2)


def tree(groups: int, policy: str, token_s: float, seed: int) -> dict[str, Any]:
    engine = {
        "decode_step_s": [[1, 1 / 219], [8, 8 / 1096], [32, 32 / 2313], [128, 128 / 3153]],
        "prefill_s": 0.003,
        "prefill_token_s": 2e-5,
    }
    trainer = {"micro_batch_s": 0.02, "token_s": token_s, "step_s": 0.02}
    return {
        "run": {"iterations": 4, "seed": seed, "checkpoint_every_iterations": 0},
        "model": {"make": {}},
        "data": {"train": {"kind": "sums"}},
        "hardware": {"name": "cpu", "source": "this file", "engine": engine, "trainer": trainer},
        "workload": {"median_tokens": 60, "sigma": 0.7, "correlation": 0.3, "prompt_tokens": 20},
        "rollout": {"groups_per_iteration": groups, "trajectories_per_group": 8, "max_new_tokens": 256},
        "engine": {"max_running": 32},
        "admission": {"policy": policy},
        "pipeline": {"mode": "fifo"},
        "training": {"trajectories_per_step": 16, "packing": "global", "micro_batch_tokens": 2048},
    }


def heavy_tailed(policy: str, slower: float, seed: int) -> Config:
    width = "auto" if policy == "soft_frontier" else 8
    return config.load(BASE, [
        f"admission.policy={policy}", f"admission.frontier_groups={width}", f"run.seed={seed}", "run.iterations=3",
        f"hardware.trainer.token_s={SPEED * slower}",
    ])  # fmt: skip


def cell(made: Callable[[int], Config]) -> str:
    rows = [row for seed in SEEDS for row in simulate(made(seed)).iterations[1:]]
    end, first = (statistics.fmean(row[key] for row in rows) for key in ("rollout_to_train_end_s", "first_dispatch_s"))
    return f"{end:.2f} / {first:.2f}".rjust(18)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    title = f"{'end, s / first dispatch, s':>24} " + " ".join(f"{policy:>18}" for policy in POLICIES)
    print(title)
    for groups in (32, 96):
        for ratio, token_s in TOKEN_S.items():
            cells = [
                cell(lambda seed: config.parse(tree(groups, policy, token_s, seed), "admission"))  # noqa: B023
                for policy in POLICIES
            ]
            print(f"{f'R {groups}, training {ratio}':>24} " + " ".join(cells), flush=True)
    print(f"\nheavy tails\n{title}")
    for slower in (4.0, 2.0, 1.0, 0.5):
        cells = [cell(lambda seed: heavy_tailed(policy, slower, seed)) for policy in POLICIES]  # noqa: B023
        print(f"{f'R 64, training {slower:g} x':>24} " + " ".join(cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

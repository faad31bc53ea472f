"""Where does a hard frontier hurt, and does the soft one? Simulated: no engine, no trainer, the very coordinators.

    python -m tests.bench.admission

K = 8, U = F_w = 2, one engine of 32 slots whose decode curve was measured here (0.9 M parameters), log-normal lengths (median
60, sigma 0.7, correlation of siblings 0.3); training costs so much a token that it takes 1.5, 1 and 0.5 times as long as
rollout.
Means over three seeds and three iterations each, the first left out: it has no measured rates.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from rpipe import config
from rpipe.sim.run import simulate

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


def main() -> int:
    print("end, s / first dispatch, s".rjust(40))
    print(f"{'R':>3} {'training : rollout':>18} " + " ".join(f"{policy:>18}" for policy in POLICIES))
    for groups in (32, 96):
        for title, token_s in TOKEN_S.items():
            cells = []
            for policy in POLICIES:
                rows = [
                    row
                    for seed in SEEDS
                    for row in simulate(config.parse(tree(groups, policy, token_s, seed), "admission")).iterations[1:]
                ]
                end, first = (statistics.fmean(r[k] for r in rows) for k in ("rollout_to_train_end_s", "first_dispatch_s"))
                cells.append(f"{end:.2f} / {first:.2f}".rjust(18))
            print(f"{groups:>3} {title:>18} " + " ".join(cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

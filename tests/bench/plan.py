"""How far from the best is what `rpipe plan` chooses, and how long does it take? Against simulating every plan.

    python -m tests.bench.plan [--accelerators 8 16] [--large 64]

Qwen3-1.7B, Qwen3-14B and Qwen3-30B-A3B on A800 by public figures (simulated only). Each row: all plans that could run, each
simulated for one iteration; the planner's choice; how much longer its iteration is than the best one's. Then the planner alone
for many accelerators: seconds of this machine. About eight minutes; `--only-large` leaves the first part out.
"""

from __future__ import annotations

import argparse
import sys
import time

from rpipe import config as configs
from rpipe.sim.planner import exhaustive, plan

CONFIG = "configs/sim/reasoning-14b-a800.yaml"
SMALL = [  # Qwen3-1.7B
    "model.shape.parameters=1720000000",
    "model.shape.layers=28",
    "model.shape.hidden_size=2048",
    "rollout.groups_per_iteration=16",
    "rollout.trajectories_per_group=8",
    "rollout.max_new_tokens=8192",
    "training.trajectories_per_step=32",
    "training.micro_batch_tokens=9216",
    "engine.max_running=32",
]
MOE = [  # Qwen3-30B-A3B
    "model.shape={parameters: 30500000000, active_parameters: 3300000000, layers: 48, hidden_size: 2048, kv_heads: 4,"
    " head_dim: 128, experts: 128, experts_per_token: 8, vocabulary: 151936}",
]
SETTINGS = {
    "1.7B, streamed": SMALL,
    "1.7B, training three times as slow": [*SMALL, "hardware.accelerator.training_efficiency=0.18"],
    "1.7B, siblings alike (0.9), few at once": [*SMALL, "workload.correlation=0.9", "engine.max_running=8"],
    "1.7B, serial": [*SMALL, "pipeline.mode=serial", "admission.policy=fifo"],
    "1.7B, exact": [*SMALL, "pipeline.mode=exact", "training.packing=group"],
    "14B, streamed": [
        "rollout.groups_per_iteration=16",
        "rollout.trajectories_per_group=8",
        "rollout.max_new_tokens=4096",
        "training.trajectories_per_step=32",
        "training.micro_batch_tokens=5120",
    ],
    "30B-A3B, streamed": [*MOE, *SMALL[3:]],
}
LARGE = {
    "1.7B": [*SMALL[:3], "training.micro_batch_tokens=17408"],
    "14B": [],
    "30B-A3B": MOE,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerators", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--large", type=int, default=64)
    parser.add_argument("--only-large", action="store_true")
    arguments = parser.parse_args()
    if not arguments.only_large:
        against_everything(arguments.accelerators)
        print()
    for name, overrides in LARGE.items():
        config = configs.load(CONFIG, overrides)
        wall, cpu = time.perf_counter(), time.process_time()
        found = plan(config, arguments.large)
        print(
            f"{name}, {config.arithmetic()}, N = {arguments.large}: {sum(1 for _ in found.space.plans()):,} plans in"
            f" {time.perf_counter() - wall:.1f} s ({time.process_time() - cpu:.1f} s of one core): {found.rollouts} rollouts,"
            f" {found.wholes} whole iterations; {found.best[0][1].iteration_s:.1f} s, at least {found.bound_s:.1f} s by bounds",
            flush=True,
        )
    return 0


def against_everything(accelerators: list[int]) -> None:
    print(f"{'':40} {'N':>3} {'plans':>6} {'best, s':>9} {'chosen, s':>9} {'longer':>7} {'simulated':>10}")
    worst = 0.0
    for name, overrides in SETTINGS.items():
        for n in accelerators:
            config = configs.load(CONFIG, overrides)
            try:
                _, everything = exhaustive(config, n, iterations=1)
            except configs.ConfigError:
                print(f"{name:40} {n:>3} nothing fits")
                continue
            found = plan(config, n, iterations=1)
            best_s, chosen_s = everything[0][1].iteration_s, found.best[0][1].iteration_s
            longer = chosen_s / best_s - 1
            worst = max(worst, longer)
            print(
                f"{name:40} {n:>3} {len(everything):>6} {best_s:>9.1f} {chosen_s:>9.1f} {longer:>7.2%}"
                f" {found.rollouts + found.wholes:>10}",
                flush=True,
            )
    print(f"worst: {worst:.2%}")


if __name__ == "__main__":
    sys.exit(main())

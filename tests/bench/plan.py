"""How far from the best is what `rpipe plan` chooses, and how long does it take? Against simulating every plan.

    python -m tests.bench.plan [--accelerators 8 16] [--large 64]

Qwen3-1.7B and Qwen3-14B on A800 by public figures (simulated only). Each row: all plans that could run, simulated for two
iterations; the planner's choice; how much longer its iteration is than the best one's. Then the planner alone for many
accelerators: seconds of this machine. About four minutes.
"""

from __future__ import annotations

import argparse
import sys
import time

from rpipe import config as configs
from rpipe.sim.planner import exhaustive, plan

CONFIG = "configs/sim/reasoning-14b-a800.yaml"
ITERATIONS = 2
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
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerators", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--large", type=int, default=64)
    arguments = parser.parse_args()
    print(f"{'':40} {'N':>3} {'plans':>6} {'best, s':>9} {'chosen, s':>9} {'longer':>7} {'simulated':>10} {'of':>7}")
    worst = 0.0
    for name, overrides in SETTINGS.items():
        for accelerators in arguments.accelerators:
            config = configs.load(CONFIG, overrides)
            try:
                judge, everything = exhaustive(config, accelerators, ITERATIONS)
            except configs.ConfigError as error:
                print(f"{name:40} {accelerators:>3} {error}")
                continue
            found = plan(config, accelerators, ITERATIONS)
            best_s, chosen_s = everything[0][1].iteration_s, found.best[0][1].iteration_s
            longer = chosen_s / best_s - 1
            worst = max(worst, longer)
            print(
                f"{name:40} {accelerators:>3} {len(everything):>6} {best_s:>9.1f} {chosen_s:>9.1f} {longer:>7.2%}"
                f" {found.rollouts + found.wholes:>10} {judge.wholes:>7}",
                flush=True,
            )
    print(f"worst: {worst:.2%}")
    print()
    for name, overrides in (
        ("1.7B", [*SMALL[:3], SMALL[-2]]),
        ("14B", SETTINGS["14B, streamed"][2:3] + SETTINGS["14B, streamed"][4:]),
    ):
        config = configs.load(CONFIG, overrides)
        wall, cpu = time.perf_counter(), time.process_time()
        found = plan(config, arguments.large)
        print(
            f"{name}, {config.arithmetic()}, N = {arguments.large}: {sum(1 for _ in found.space.plans()):,} plans in"
            f" {time.perf_counter() - wall:.1f} s ({time.process_time() - cpu:.1f} s of one core): {found.rollouts} rollouts,"
            f" {found.wholes} whole iterations; {found.best[0][1].iteration_s:.1f} s, at least {found.bound_s:.1f} s by bounds"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How fast is the simulator, and how does it grow?

    python -m tests.bench.sim_scale [--largest 1024]

One iteration of R groups of 8 on E engines, R x K = 98 trajectories an engine, lengths as DeepSeek-R1 was served, admission by
frontier, groups streamed to 64 training replicas. Four sizes, each twice the one before; the event log is written. The growth
exponent is the slope of log(CPU seconds) over log(trajectories). One process, one thread.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import sys
import tempfile
import time
from pathlib import Path

from rpipe import config as configs
from rpipe.sim.run import Result, simulate

ROOT = Path(__file__).resolve().parents[2]
GROUP, PER_ENGINE = 8, 98


def size(engines: int, folder: Path) -> tuple[int, float, Result]:
    groups = engines * PER_ENGINE // GROUP
    trajectories = groups * GROUP
    gc.collect()
    config = configs.load(
        ROOT / "configs" / "sim" / "reasoning-14b-a800.yaml",
        [
            "run.iterations=1",
            f"cluster.rollout_ranks={2 * engines}",
            "cluster.training_ranks=256",
            f"rollout.groups_per_iteration={groups}",
            f"rollout.trajectories_per_group={GROUP}",
            f"training.trajectories_per_step={groups // 4 * GROUP}",
            f"admission.frontier_groups={groups // 2}",
        ],
    )
    began = time.process_time()
    result = simulate(config, folder / str(engines))
    return trajectories, time.process_time() - began, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=1024, help="engines")
    asked = parser.parse_args()
    points: list[tuple[float, float]] = []
    heads = ("engines", "trajectories", "events", "simulated s", "wall s", "CPU s", "CPU us a trajectory")
    print("".join(f"{head:>{width}}" for head, width in zip(heads, (8, 14, 10, 13, 9, 8, 21))))
    with tempfile.TemporaryDirectory() as folder:
        size(16, Path(folder))  # imports and caches
        for engines in (asked.largest // 8, asked.largest // 4, asked.largest // 2, asked.largest):
            trajectories, cpu_s, result = size(engines, Path(folder))
            points.append((math.log(trajectories), math.log(cpu_s)))
            print(
                f"{engines:>8}{trajectories:>14,}{result.attempt.events:>10,}{result.seconds:>13,.0f}{result.wall_s:>9.1f}"
                f"{cpu_s:>8.1f}{cpu_s / trajectories * 1e6:>21.0f}",
                flush=True,
            )
    print(f"growth exponent {slope(points):.2f}; peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    return 0


def slope(points: list[tuple[float, float]]) -> float:
    x, y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


if __name__ == "__main__":
    sys.exit(main())

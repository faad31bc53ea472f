"""Where do streaming and frontier dispatch help, where do they do nothing, where does a hard frontier hurt? In the simulator.

    python -m tests.bench.sweeps [--out docs/images] [--seeds 3]

One base case (configs/sim/sweep-base.yaml: a reasoning workload on A100 nodes, rollout and training about in balance); each
picture varies one thing: R, K, U, F_w, correlation of siblings' lengths, rollout / train ratio. Lines are time from rollout
start to train end as a share of serial mode's, mean and range over seeds; under 1 is a gain. The second iteration counts: the
soft frontier, which finds its F_w itself, knows both stages' rates by then. All simulated, on an uncalibrated profile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from rpipe import config as configs
from rpipe.sim.run import simulate

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "configs" / "sim" / "sweep-base.yaml"
POLICIES: dict[str, tuple[str, ...]] = {
    "CGP (fifo admission)": ("admission.policy=fifo",),
    "CGP+FGD (hard frontier)": ("admission.policy=frontier",),
    "soft frontier": ("admission.policy=soft_frontier", "admission.frontier_groups=auto"),
}
COLOURS = ("#4c78a8", "#e45756", "#54a24b")
SERIAL = ("pipeline.mode=serial", "admission.policy=fifo")
SPEED = 3.2e-4  # seconds of a replica's compute a token in the base case


def sweeps() -> dict[str, dict[str, tuple[str, ...]]]:
    """Picture -> point -> overrides."""
    return {
        "R, groups an iteration": {str(r): (f"rollout.groups_per_iteration={r}",) for r in (16, 32, 64, 128)},
        "K, trajectories a group": {
            str(k): (f"rollout.trajectories_per_group={k}", f"training.trajectories_per_step={8 * k}") for k in (4, 8, 16, 32)
        },
        "U, groups a step": {str(u): (f"training.trajectories_per_step={u * 8}",) for u in (2, 4, 8, 16, 32, 64)},
        "F_w, groups in the frontier": {str(f): (f"admission.frontier_groups={f}",) for f in (2, 4, 8, 16, 32, 64)},
        "correlation of siblings' lengths": {str(c): (f"workload.correlation={c}",) for c in (0.1, 0.3, 0.75, 0.9)},
        "rollout / train": {
            f"{1 / x:g}": (f"hardware.trainer.token_s={SPEED * x}",) for x in (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
        },
    }


def ratios(overrides: tuple[str, ...], seeds: int) -> dict[str, list[float]]:
    """Of each policy, over serial, one a seed."""
    found: dict[str, list[float]] = {name: [] for name in POLICIES}
    for seed in range(seeds):
        common = (*overrides, f"run.seed={seed}")
        serial = whole_s((*common, *SERIAL))
        for name, policy in POLICIES.items():
            found[name].append(whole_s((*common, *policy)) / serial)
    return found


def whole_s(overrides: tuple[str, ...]) -> float:
    value: float = simulate(configs.load(BASE, list(overrides))).iterations[-1]["rollout_to_train_end_s"]
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    print(f"share of serial mode's time, mean of {asked.seeds} seeds")
    for title, points in sweeps().items():
        found[title] = {}
        print(f"\n{title:36}" + "".join(f"{point:>8}" for point in points))
        for point, overrides in points.items():
            found[title][point] = ratios(overrides, asked.seeds)
        for name in POLICIES:
            print(f"  {name:34}" + "".join(f"{statistics.mean(found[title][point][name]):>8.2f}" for point in points))
        sys.stdout.flush()
    draw(found, asked.out / "sweeps.png")
    return 0


def draw(found: dict[str, dict[str, dict[str, list[float]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(11, 6.4), sharey=True)
    for axis, (title, points) in zip(axes.flat, found.items()):
        at = range(len(points))
        for name, colour in zip(POLICIES, COLOURS):
            rows: list[list[float]] = [point[name] for point in points.values()]
            axis.plot(at, [statistics.mean(row) for row in rows], marker="o", color=colour, label=name)
            axis.fill_between(at, [min(row) for row in rows], [max(row) for row in rows], color=colour, alpha=0.15, linewidth=0)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(list(at), list(points))
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("time / serial's time")
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylim(bottom=0.5, top=6.0)
    axes[0, 0].set_yticks([0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0], ["0.5", "0.7", "1", "1.5", "2", "3", "5"])
    axes[0, 0].minorticks_off()
    handles: Any = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())

"""What does streaming gain on the quickstart? serial against fifo + frontier, alternating, in one command.

    python -m tests.bench.modes [--rounds 3] [--iterations 12]

Serial is the baseline at its best (global packing, configs/policy/serial.yaml). Both run the same prompts from the same
warmed-up weights. Each round runs one job of each, in turn; a figure is the median over a job's iterations but the first
two, then over rounds, with the lowest and highest round in brackets. On two cores the stages share the cores: the
gain is what overlap leaves of that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.jobs import run

MODES = {
    "serial": ["pipeline.mode=serial", "admission.policy=fifo", "training.packing=global"],
    "fifo + frontier": ["pipeline.mode=fifo", "admission.policy=frontier", "training.packing=global"],
}
FIGURES = {
    "rollout to train end, s": "rollout_to_train_end_s",
    "rollout, s": "rollout_s",
    "trainer busy, s": "train_busy_s",
    "first dispatch, s": "first_dispatch_s",
    "waiting ratio (start)": "waiting_ratio_start",
    "waiting ratio (busy)": "waiting_ratio_busy",
    "generated tokens": "generated_tokens",
    "trajectories": "trajectories",
}
LEFT_OUT = 2  # iterations in which caches and pages are still cold


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in MODES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for name, chosen in MODES.items():
                common = [f"run.iterations={arguments.iterations}", "evaluation.prompts=0", *arguments.overrides]
                report = run(arguments.config, Path(folder) / f"{number}-{chosen[0]}", *common, *chosen)
                rounds[name].append(medians(report))
                print(
                    f"round {number + 1}, {name}: {rounds[name][-1]['rollout_to_train_end_s']:.3f} s an iteration", flush=True
                )
    print()
    print(f"{arguments.config}, {arguments.rounds} rounds of {arguments.iterations} iterations")
    print(f"{'':26} {'serial':>24} {'fifo + frontier':>24} {'ratio':>22}")
    for title, key in FIGURES.items():
        serial, streamed = ([r[key] for r in rounds[name]] for name in MODES)
        ratios = [b / a for a, b in zip(serial, streamed) if a]
        print(f"{title:26} {spread(serial):>24} {spread(streamed):>24} {spread(ratios) if ratios else '-':>22}")
    return 0


def medians(report: dict[str, Any]) -> dict[str, float]:
    kept = report["iterations"][LEFT_OUT:]
    return {key: statistics.median(i[key] for i in kept) for key in FIGURES.values()}


def spread(values: list[float]) -> str:
    def text(x: float) -> str:
        return f"{x:.0f}" if x >= 100 else f"{x:.3f}"

    return f"{text(statistics.median(values))} [{text(min(values))} .. {text(max(values))}]"


if __name__ == "__main__":
    sys.exit(main())

"""Draws what a run learned: mean training reward of each iteration, held-out reward at each evaluation.

python -m tests.bench.curve RUN_DIR OUT.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("out", type=Path, metavar="OUT.png")
    arguments = parser.parse_args()
    draw(json.loads((arguments.run / "report.json").read_text()), arguments.out)


def draw(report: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), dpi=110)
    iterations = report["iterations"]
    axes.plot([i["iteration"] + 1 for i in iterations], [i["reward_mean"] for i in iterations], color="#9ab", label="training")
    held_out = report["evaluations"]
    count = held_out[0]["count"]
    axes.plot(
        [e["iteration"] for e in held_out], [e["reward_mean"] for e in held_out], "o-", color="#c30", ms=3.5,
        label=f"held-out ({count} prompts)",
    )  # fmt: skip
    axes.set_xlabel("iteration")
    axes.set_ylabel("mean reward")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    told = report["run"]
    axes.set_title(f"{told['name']}: {len(iterations)} iterations in {told['seconds'] / 60:.0f} minutes", fontsize=10)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main()

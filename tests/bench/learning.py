"""Is the quickstart's learning real? Held-out reward before and after, on several seeds, and with shuffled rewards.

    python -m tests.bench.learning                 the committed settings, seeds 0 1 2
    python -m tests.bench.learning --shuffled      the control: advantages follow rewards permuted within each group

Exit code 1 where a seed's rise is below RISE (or, shuffled, not below it).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.bench.jobs import run

RISE = 0.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shuffled", action="store_true")
    arguments = parser.parse_args()
    control = ["reward.shuffle=true"] if arguments.shuffled else []
    print(f"{arguments.config}{' with shuffled rewards' if control else ''}: mean held-out reward at temperature 1")
    print(f"{'seed':>4} {'before':>7} {'after':>7} {'rise':>7} {'prompts':>7} {'wall s':>7}")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            report = run(arguments.config, Path(folder) / f"seed-{seed}", f"run.seed={seed}", *control)
            first, last = report["evaluations"][0], report["evaluations"][-1]
            rise = last["reward_mean"] - first["reward_mean"]
            good &= (rise < RISE) if control else (rise >= RISE)
            print(
                f"{seed:>4} {first['reward_mean']:>7.3f} {last['reward_mean']:>7.3f} {rise:>+7.3f} {last['count']:>7}"
                f" {report['wall_s']:>7.0f}",
                flush=True,
            )
    wanted = f"a rise below {RISE}" if control else f"a rise of at least {RISE}"
    print(f"wanted: {wanted} on each seed: {'yes' if good else 'NO'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

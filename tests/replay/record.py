"""Records the golden histories: one small scripted job of each mode.   python -m tests.replay.record"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.job.jobs import config, train
from tests.replay.test_golden import GOLDEN


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for mode, policy in (("serial", "fifo"), ("exact", "frontier"), ("fifo", "frontier")):
            tree = config(
                run={"name": mode, "iterations": 2, "seed": 3},
                cluster={"rollout_ranks": 2, "training_ranks": 2},
                pipeline={"mode": mode},
                admission={"policy": policy},
                rollout={"groups_per_iteration": 6, "filter": "zero_variance"},
                data={
                    "train": {"kind": "sums", "size": 200, "reward": "tests.job.jobs:random_after_a_while"},
                    "held_out": {"kind": "sums", "size": 5, "reward": "last_integer"},
                },
                evaluation={"prompts": 5},
            )
            run_dir = Path(folder) / mode
            train(run_dir, tree)
            shutil.rmtree(GOLDEN / mode, ignore_errors=True)
            (GOLDEN / mode).mkdir(parents=True)
            shutil.copy(run_dir / "config.yaml", GOLDEN / mode)
            shutil.copy(run_dir / "attempt-1" / "events" / "rank00000.jsonl", GOLDEN / mode)
            shutil.copy(run_dir / "attempt-1" / "events" / "rank00002.jsonl", GOLDEN / mode / "rank00001.jsonl")
            text = (GOLDEN / mode / "config.yaml").read_text().replace(str(run_dir), "runs/golden")
            (GOLDEN / mode / "config.yaml").write_text(text)


if __name__ == "__main__":
    main()

"""Records the golden histories: one small scripted job of each mode, and one with tools.   python -m tests.replay.record"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.job.jobs import config, train
from tests.replay.test_golden import GOLDEN


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tools = {"environment": "tests.job.jobs:fails_sometimes", "max_turns": 3, "max_new_tokens": 60}
        for name, mode, policy, several in (
            ("serial", "serial", "fifo", {}),
            ("exact", "exact", "frontier", {}),
            ("fifo", "fifo", "frontier", {}),
            ("tools", "fifo", "frontier", tools),
        ):
            tree = config(
                run={"name": name, "iterations": 2, "seed": 3},
                cluster={"rollout_ranks": 2, "training_ranks": 2},
                pipeline={"mode": mode},
                admission={"policy": policy},
                rollout={"groups_per_iteration": 6, "filter": "zero_variance", **several},
                data={
                    "train": {"kind": "sums", "size": 200, "reward": "tests.job.jobs:random_after_a_while"},
                    "held_out": {"kind": "sums", "size": 5, "reward": "last_integer"},
                },
                evaluation={"prompts": 5},
            )
            run_dir = Path(folder) / name
            train(run_dir, tree)
            shutil.rmtree(GOLDEN / name, ignore_errors=True)
            (GOLDEN / name).mkdir(parents=True)
            shutil.copy(run_dir / "config.yaml", GOLDEN / name)
            shutil.copy(run_dir / "attempt-1" / "events" / "rank00000.jsonl", GOLDEN / name)
            shutil.copy(run_dir / "attempt-1" / "events" / "rank00002.jsonl", GOLDEN / name / "rank00001.jsonl")
            text = (GOLDEN / name / "config.yaml").read_text().replace(str(run_dir), "runs/golden")
            (GOLDEN / name / "config.yaml").write_text(text)


if __name__ == "__main__":
    main()

"""A small simulated job, and where its log is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpipe.config import Config

HARDWARE: dict[str, Any] = {
    "name": "made up",
    "source": "a test",
    "engine": {"decode_step_s": [[1, 0.004], [8, 0.007], [32, 0.014]], "context_token_s": 1e-7, "prefill_s": 0.01},
    "trainer": {"micro_batch_s": 0.02, "token_s": 1e-4, "step_s": 0.03},
}
WORKLOAD: dict[str, Any] = {"median_tokens": 20, "sigma": 0.8, "prompt_tokens": 8}


def config(**sections: Any) -> Config:
    """2 engines, 2 training replicas, 2 iterations of 12 groups of 4; sections are merged into it."""
    base: dict[str, Any] = {
        "run": {"name": "simulated", "iterations": 2, "seed": 1},
        "cluster": {"rollout_ranks": 2, "training_ranks": 2},
        "model": {"make": {}},
        "data": {"train": {"kind": "sums"}, "held_out": {"kind": "sums"}},
        "rollout": {"groups_per_iteration": 12, "trajectories_per_group": 4, "max_new_tokens": 100},
        "engine": {"max_running": 8},
        "training": {"trajectories_per_step": 16, "micro_batch_tokens": 300, "packing": "group"},
        "evaluation": {"prompts": 5},
        "hardware": HARDWARE,
        "workload": WORKLOAD,
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return Config.model_validate(base)


def logs(run_dir: Path) -> list[Path]:
    """The rollout coordinator's, then the training coordinator's."""
    return sorted((run_dir / "attempt-1" / "events").glob("rank*.jsonl"))

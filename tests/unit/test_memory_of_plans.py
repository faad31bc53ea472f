"""The planner's estimate of memory, from a model's sizes, agrees with the check before a start, from its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rpipe.config import Config
from rpipe.sim.memory import PROCESS_BYTES, engine_memory, trainer_memory
from rpipe.sim.shape import shape_of
from rpipe.training import memory
from rpipe.training.hf import Shape

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
PUBLISHED = {  # as their config.json say
    "qwen3-1.7b": Shape("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 1e-6, 40960, 1e6, True),
    "qwen3-14b": Shape("qwen3", 151936, 5120, 17408, 40, 40, 8, 128, 1e-6, 40960, 1e6, False),
    "qwen3-30b-a3b": Shape(
        "qwen3_moe",
        151936,
        2048,
        6144,
        48,
        32,
        4,
        128,
        1e-6,
        40960,
        1e6,
        False,
        experts=128,
        experts_per_token=8,
        expert_size=768,
    ),
}
LAYOUTS = [
    ("qwen3-1.7b", {}),
    ("qwen3-1.7b", {"tp": 2, "pp": 2}),
    ("qwen3-1.7b", {"cp": 4, "recompute": "full"}),
    ("qwen3-14b", {"tp": 4, "micro_batch_tokens": 16384}),
    ("qwen3-14b", {"tp": 8, "pp": 2, "recompute": "full"}),
    ("qwen3-14b", {"tp": 2, "cp": 2, "optimizer": {"offload": True}}),
    ("qwen3-30b-a3b", {"ep": 8}),
    ("qwen3-30b-a3b", {"ep": 4, "pp": 4, "recompute": "full"}),
]


@pytest.mark.parametrize("model, training", LAYOUTS, ids=str)
def test_trainer_and_engine_need_what_the_check_before_a_start_says(model, training):
    sections = yaml.safe_load((MODELS / f"{model}.yaml").read_text())
    config = Config.model_validate(
        {
            **sections,
            "data": {"train": {"kind": "sums"}},
            "cluster": {"rollout_ranks": 4, "training_ranks": 16, "accelerator": "cuda"},
            "engine": {"tp": 4, "kv_tokens": 100_000},
            "training": training,
            "pipeline": {"old_logprob": "pinned"},
        }
    )
    wanted, found = memory.training(config, PUBLISHED[model]), trainer_memory(config, shape_of(config))
    assert found.total == pytest.approx(wanted.total, rel=0.04)
    for mine, theirs in (("weights", "weights"), ("gradients", "gradients"), ("copies", "kept copies")):
        assert getattr(found, mine) == pytest.approx(wanted.parts[theirs], rel=0.02), mine
    serving = memory.engine(config, PUBLISHED[model]).parts
    engine = engine_memory(config, shape_of(config), 100_000)
    assert engine.weights == pytest.approx(serving["weights"], rel=0.01)
    assert engine.kv_cache == pytest.approx(serving["KV cache"], rel=0.01)
    assert serving["process"] == PROCESS_BYTES

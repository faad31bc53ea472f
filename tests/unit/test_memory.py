"""Does the estimate of memory count what is there, and refuse what cannot fit?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rpipe.config import Config
from rpipe.control.settings import training_settings
from rpipe.policy.batching import Item, heaviest, pack
from rpipe.training import memory
from rpipe.training.hf import Shape

# Qwen3-1.7B, as its config.json says
QWEN3 = Shape("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 1e-6, 40960, 1e6, True)
MOE = replace(QWEN3, architecture="qwen3_moe", experts=128, experts_per_token=8, expert_size=768, tied=False)


def config(training: dict[str, Any] | None = None, ranks: int = 1, accelerator: str = "cuda", **sections: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "/x"},
            "data": {"train": {"kind": "sums"}},
            "cluster": {"training_ranks": ranks, "accelerator": accelerator},
            "training": training or {},
            **sections,
        }
    )


def test_parameters_are_those_of_the_published_model() -> None:
    dense, experts = memory.parameters(config(), QWEN3)
    assert (dense, experts) == (1_720_574_976, 0)  # "1.7 B, 1.4 B without embeddings"
    layer = 3 * 768 * 2048
    assert memory.parameters(config(), MOE)[1] == 28 * 128 * layer


def test_parallel_sizes_divide_what_they_cut() -> None:
    whole = memory.parameters(config(), MOE)
    assert memory.parameters(config({"ep": 4}, 4), MOE) == (whole[0], whole[1] // 4)
    tp = memory.parameters(config({"tp": 2}, 2), QWEN3)[0]
    norms = 28 * (2 * 2048 + 2 * 128) + 2048  # whole on every rank
    assert tp - norms == (1_720_574_976 - norms) // 2
    stage = memory.parameters(config({"pp": 2}, 2), QWEN3)[0]  # the last one: its own copy of a tied embedding, and a norm
    embedding = 151936 * 2048
    assert stage == (1_720_574_976 - embedding - 2048) // 2 + embedding + 2048


def test_optimizer_states_shrink_with_replicas_and_recompute_and_cp_with_activations() -> None:
    one, two = (memory.training(config(ranks=n), QWEN3).parts for n in (1, 2))
    assert one["optimizer"] == 12 * 1_720_574_976 and two["optimizer"] == one["optimizer"] // 2
    full = memory.training(config({"recompute": "full"}), QWEN3).parts
    assert full["activations"] < one["activations"] / 8
    cp = memory.training(config({"cp": 2}, 2), QWEN3).parts
    assert cp["activations"] == one["activations"] // 2
    offload = memory.training(config({"optimizer": {"offload": True}}), QWEN3)
    assert offload.total < memory.training(config(), QWEN3).total


def test_kept_copies_are_counted() -> None:
    found = config({"loss": {"kl_coefficient": 0.1}}, pipeline={"old_logprob": "pinned"})
    parts = memory.training(found, QWEN3).parts
    assert parts["kept copies"] == 2 * parts["weights"] == 4 * 1_720_574_976


def test_what_does_not_fit_is_refused_with_its_parts_and_what_to_do() -> None:
    found = config({"micro_batch_tokens": 32768})
    needs = memory.needs(found, QWEN3)
    assert memory.problem(found, needs, 141 << 30, ["n"] * 2) == ""
    why = memory.problem(found, needs, 40 << 30, ["n"] * 2)
    assert why.startswith("training: ") and "does not fit a device of 40.0 GiB; try training.recompute = full" in why
    assert "\n" not in why


def test_ranks_of_a_host_share_its_memory_on_a_cpu() -> None:
    found = config(ranks=3, accelerator="cpu")
    needs = memory.needs(found, QWEN3)
    together = needs[1].total + 3 * needs[0].total
    room = int(together / memory.FIT) + (1 << 20)
    assert memory.problem(found, needs, room, ["a"] * 4) == ""
    why = memory.problem(found, needs, room - (2 << 20), ["a"] * 4)
    assert why.startswith("3 training ranks and 1 engines on a want")
    assert memory.problem(found, needs, int(2 * needs[0].total / memory.FIT) + (1 << 20), ["a", "b", "b", "c"]) == ""


def test_roles_that_share_a_device_share_its_memory() -> None:
    cluster = {"accelerator": "cuda", "training_ranks": 1, "rollout_ranks": 2, "share_device": True}
    found = Config.model_validate({**config().model_dump(), "cluster": cluster, "channel": {"backend": "gloo"}})
    needs = memory.needs(found, QWEN3)
    together = 2 * needs[1].total + needs[0].total
    room = int(together / memory.FIT) + (1 << 20)
    assert max(need.total for need in needs) < 0.9 * room, "each by itself would fit"
    assert memory.problem(found, needs, room, ["a"] * 3) == ""
    why = memory.problem(found, needs, room - (2 << 20), ["a"] * 3)
    assert why.startswith("1 training ranks and 2 engines on the first device of a want ")
    assert why.endswith("; try cluster.share_device = false: a device for each rank")
    assert memory.problem(found, needs, room - (2 << 20), ["a", "b", "b"]) == ""


def test_no_peer_of_expert_parallel_ranks_gets_more_of_a_micro_batch_than_is_planned() -> None:
    found = config({"ep": 8, "micro_batch_tokens": 16384}, 8)
    settings = training_settings(found)
    packed = pack([Item(0, i, 14_000) for i in range(9)], settings.micro_batch_tokens, settings.peers)
    assert max(heaviest(batch, found.training.ep) for batch in packed) <= found.training.micro_batch_tokens


@pytest.mark.parametrize("key", ["micro_batch_tokens", "logprob_chunk_tokens"])
def test_more_tokens_at_once_need_more(key: str) -> None:
    small, large = (memory.training(config({key: n}), QWEN3).total for n in (4096, 8192))
    assert small < large

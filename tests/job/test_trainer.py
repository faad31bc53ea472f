"""Does the real trainer compute what transformers and torch's AdamW do, streamed, cut and resumed?

Real ranks under mpirun (trainer_worker.py); each launch measures many things and the tests below judge them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.job.mpi import run_mpi

WORKER = "tests/job/trainer_worker.py"
pytestmark = [pytest.mark.job, pytest.mark.timeout(800)]  # a test may be the first to ask for every launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


def _run(scenario: str, ranks: int, folder: Path) -> Any:
    run_mpi(ranks, WORKER, scenario, str(folder), timeout_s=200)
    return json.loads((folder / f"{scenario}.json").read_text())


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return _run("reference", 1, folder)


@pytest.fixture(scope="module")
def losses(folder: Path) -> Any:
    return _run("losses", 1, folder)


@pytest.fixture(scope="module")
def guards(folder: Path) -> Any:
    return _run("guards", 1, folder)


@pytest.fixture(scope="module")
def dp2(folder: Path, guards: Any) -> Any:  # meets the model that guards warmed up
    return _run("dp2", 2, folder)


@pytest.fixture(scope="module")
def tp2(folder: Path, dp2: Any) -> Any:  # loads what dp2 saved
    return _run("tp2", 2, folder)


@pytest.fixture(scope="module")
def tp2dp2(folder: Path, dp2: Any) -> Any:  # trains the model that dp2 made
    return _run("tp2dp2", 4, folder)


@pytest.fixture(scope="module")
def cut(folder: Path, dp2: Any) -> Any:
    """Layouts that run in lockstep; each launch is made when first asked for. They load what dp2 saved."""
    ranks = {"pp2": 2, "cp2": 2, "ep2": 2, "pp2ep2": 4}
    seen: dict[str, Any] = {}

    def run(layout: str) -> Any:
        if layout not in seen:
            seen[layout] = _run(layout, ranks[layout], folder)
        return seen[layout]

    return run


@pytest.mark.parametrize("model", ["qwen3 tied", "qwen3 untied", "qwen2 tied", "qwen2 untied", "llama tied", "llama untied"])
def test_three_steps_equal_transformers_and_torch_adamw(reference: Any, model: str) -> None:
    seen = reference[model]
    assert seen["start"] == 0.0
    assert seen["grads"] < 1e-5
    assert seen["norm"] < 1e-5
    assert seen["stats"] < 1e-5
    assert seen["weights"] < 1e-5
    assert 0.01 < seen["clip"] < 0.9  # the batch does exercise the clip


def test_weight_specs_say_what_the_buckets_hold(reference: Any) -> None:
    assert all(seen["specs"] for seen in reference.values())


def test_sharded_safetensors_are_read(reference: Any) -> None:
    assert reference["qwen3 tied"]["files"] > 1
    assert reference["qwen3 untied"]["files"] == 1


@pytest.mark.parametrize("case", ["token_mean", "sequence_mean", "fixed", "narrow_clip", "kl", "no_given"])
def test_loss_equals_the_plain_objective(losses: Any, case: str) -> None:
    assert losses[case]["grads"] < 1e-5
    assert losses[case]["stats"] < 2e-5


def test_kl_and_clip_cases_are_not_trivial(losses: Any) -> None:
    assert losses["kl"]["kl"] > 0.01
    assert losses["narrow_clip"]["clip"] > losses["token_mean"]["clip"] > 0.0


def test_chunked_logprobs_equal_unchunked(losses: Any) -> None:
    assert losses["chunks"] < 1e-5


def test_recomputed_activations_give_the_same_gradient_and_run_layers_twice(losses: Any) -> None:
    seen = losses["recompute"]
    assert seen["grads"] < 1e-6
    assert seen["full"] == 2 * seen["none"] > 0


def test_truncated_importance_sampling_weighs_by_trainer_over_engine(losses: Any) -> None:
    assert losses["importance"]["grads"] < 1e-5


def test_same_input_gives_the_same_bits(guards: Any) -> None:
    assert guards["deterministic"] == 0.0


def test_the_first_step_of_a_warm_up_moves_and_a_cosine_falls(guards: Any) -> None:
    assert guards["rates"][0] == pytest.approx(1e-3)
    assert 0.0 < guards["rates"][1] < guards["rates"][0]


def test_a_gradient_that_is_not_finite_changes_nothing(guards: Any) -> None:
    seen = guards["nan"]
    assert seen["skipped"] and not seen["next_skipped"]
    assert seen["unchanged"] == 0.0
    assert seen["schedule_kept"]
    assert seen["next"] == 0.0 and seen["same"]


def test_a_resumed_trainer_goes_on_bit_equal(guards: Any) -> None:
    seen = guards["resume"]
    assert seen["extra"] == {"iteration": 4, "cursor": [1, 2]}
    assert seen["loaded"] == 0.0 and seen["later"] == 0.0
    assert seen["same_stats"] and seen["random"]


def test_a_checkpoint_replaces_an_older_one_and_leaves_no_rest(guards: Any) -> None:
    assert guards["resume"]["again"] == {"iteration": 5}
    assert guards["resume"]["left"] == []


def test_a_damaged_or_absent_checkpoint_is_refused(guards: Any) -> None:
    assert "damaged" in guards["resume"]["torn"]
    assert "no complete checkpoint" in guards["resume"]["absent"]


def test_export_loads_in_transformers_and_back_bit_exact(guards: Any) -> None:
    seen = guards["export"]
    assert seen["logprobs"] < 1e-5
    assert seen["transformers"] == 0.0 and seen["round_trip"] == 0.0
    assert seen["files"] > 1 and seen["tokenizer"]


def test_supervised_warm_up_lowers_the_loss_and_leaves_a_new_optimizer(guards: Any) -> None:
    seen = guards["warm_up"]
    assert seen["last"] < seen["first"] - 1.0
    assert all(m == 0.0 for m in seen["moments"])
    assert seen["rate"] == pytest.approx(1e-3)  # the schedule's first step
    assert seen["as_new"] == 0.0


def test_pinned_logprobs_are_those_of_the_weights_last_published(guards: Any) -> None:
    assert guards["pinned"]["grads"] < 1e-4


def test_a_step_without_a_trained_token_moves_nothing_whatever_the_loss_is_divided_by(guards: Any) -> None:
    assert guards["untrained"] == {"moved": 0.0, "schedule": 0, "skipped": False, "sequences": 6}


def test_a_publish_and_a_resume_copy_no_kept_weights_into_new_memory(guards: Any) -> None:
    assert guards["kept"]["both"] == guards["kept"]["plain"]


def test_an_offloaded_optimizer_goes_to_rest_though_a_checkpoint_cannot_be_written(guards: Any) -> None:
    assert guards["kept"]["rests"] == 1


@pytest.mark.parametrize("spread", ["uneven", "none"])
def test_two_replicas_with_unequal_work_equal_one_big_batch(dp2: Any, spread: str) -> None:
    seen = dp2[spread]
    assert seen["replicas"] == 2
    assert seen["grads"] < 1e-5
    assert seen["norm"] < 1e-5
    assert seen["weights"] < 1e-5
    assert seen["stats"] < 1e-5
    assert seen["same"]


def test_two_replicas_warm_up_as_one_does(dp2: Any) -> None:
    assert dp2["warmed"] < 1e-5


@pytest.mark.parametrize("layout", ["tp2", "tp2dp2"])
def test_tensor_parallel_ranks_equal_one_big_batch(tp2: Any, tp2dp2: Any, layout: str) -> None:
    seen = tp2["streamed"] if layout == "tp2" else tp2dp2
    assert seen["replicas"] == (1 if layout == "tp2" else 2)
    assert seen["grads"] < 1e-5
    assert seen["norm"] < 1e-5
    assert seen["weights"] < 1e-5
    assert seen["stats"] < 1e-5
    assert seen["same"]


def test_bfloat16_weights_train_with_float32_gradients_and_resume_bit_equal(guards: Any) -> None:
    seen = guards["bfloat16"]
    assert seen["dtypes"] == ["bfloat16", "torch.bfloat16"]
    assert seen["grads"] == ["torch.float32"]
    assert seen["later"] == 0.0 and seen["same"]


def test_a_nan_on_one_rank_makes_every_rank_skip(dp2: Any, tp2: Any, tp2dp2: Any) -> None:
    assert tp2dp2["poison"] == [True] * 4
    assert dp2["uneven"]["poison"] == [True, True]
    assert tp2["streamed"]["poison"] == [True, True]


LOCKSTEP = [*((layout, calls) for layout in ("pp2", "cp2", "ep2") for calls in ("one", "four")), ("pp2ep2", "four")]


@pytest.mark.parametrize(("layout", "calls"), LOCKSTEP)
def test_pipeline_context_and_expert_parallel_ranks_equal_one_big_batch(cut: Any, layout: str, calls: str) -> None:
    seen = cut(layout)[calls]
    assert seen["replicas"] == 1
    for what in ("grads", "norm", "weights", "stats", "logprobs"):
        assert seen[what] < 1e-5, what
    assert seen["same"] and all(seen["poison"])


def test_experts_on_two_whole_replicas_equal_one_big_batch(dp2: Any) -> None:
    seen = dp2["experts"]
    assert seen["replicas"] == 2
    for what in ("grads", "norm", "weights", "stats", "logprobs"):
        assert seen[what] < 1e-5, what


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2", "ep2"])
def test_a_checkpoint_of_two_replicas_goes_on_under_every_layout(dp2: Any, tp2: Any, cut: Any, layout: str) -> None:
    seen = (tp2 if layout == "tp2" else cut(layout))["reshard"]
    assert seen["extra"] == {"at": 2}
    assert seen["loaded"] == 0.0
    assert seen["after"] < 1e-5
    assert seen["norms"] == pytest.approx(dp2["saved"]["moe" if layout == "ep2" else "qwen2"]["norms"], rel=1e-5)
    assert seen["kl"] > 0.0  # against the reference of the run's start, not of the checkpoint
    assert seen["exported"] == 0.0  # whole tensors, bit-exact, as transformers reads them

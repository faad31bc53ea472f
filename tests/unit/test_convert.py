"""Do weights survive the way into megatron's layout and back, cut over any number of ranks?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rpipe.config import Training
from rpipe.training import convert, hf

QWEN3 = hf.Shape(
    architecture="qwen3",
    vocab_size=13,
    hidden_size=8,
    intermediate_size=12,
    layers=2,
    heads=8,
    kv_heads=4,
    head_dim=3,
    norm_epsilon=1e-6,
    max_positions=64,
    rope_theta=1e6,
    tied=True,
)
SHAPES = [QWEN3, replace(QWEN3, architecture="qwen2", tied=False), replace(QWEN3, architecture="llama", kv_heads=8)]


def parameters(shape: hf.Shape, fused_norms: bool = False) -> list[str]:
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"] + (
        [] if shape.tied else ["output_layer.weight"]
    )
    for i in range(shape.layers):
        inside = ["linear_proj.weight", "linear_qkv.weight"]
        inside += ["linear_qkv.bias"] * shape.qkv_bias + ["q_layernorm.weight", "k_layernorm.weight"] * shape.qk_norm
        inside += ["linear_qkv.layer_norm_weight"] * fused_norms
        names += [f"decoder.layers.{i}.self_attention.{n}" for n in inside]
        norms = ["mlp.linear_fc1.layer_norm_weight"] if fused_norms else ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
        names += [f"decoder.layers.{i}.{n}" for n in ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight", *norms]]
    return names


def tensors(shape: hf.Shape, rows: list[convert.Row]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(s) for row in rows for name, s in zip(row.names, convert.hf_shapes(shape, row))}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.architecture)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_round_trip_is_bit_exact_over_any_tp(shape: hf.Shape, tp: int) -> None:
    rows = convert.table(shape, False)
    whole = tensors(shape, rows)
    back: dict[str, torch.Tensor] = {}
    for row in rows:
        parts = [convert.to_megatron(whole, row, shape, tp, r) for r in range(tp)]
        assert len({p.shape for p in parts}) == 1  # megatron's parameters are alike on all ranks
        back.update(convert.to_hf(parts, row, shape))
    assert set(back) == set(whole)
    assert all(torch.equal(back[n], whole[n]) for n in whole)


def test_qkv_is_interleaved_by_query_group() -> None:
    row = next(r for r in convert.table(QWEN3, False) if r.how == "qkv")
    sizes = [s[0] for s in convert.hf_shapes(QWEN3, row)]
    mark = {
        n: torch.full((s, 8), 0.0) + 100 * i + torch.arange(s)[:, None] // 3 for i, (n, s) in enumerate(zip(row.names, sizes))
    }
    heads = convert.to_megatron(mark, row, QWEN3, 1, 0)[::3, 0].tolist()
    assert heads == [0, 1, 100, 200, 2, 3, 101, 201, 4, 5, 102, 202, 6, 7, 103, 203]
    assert convert.to_megatron(mark, row, QWEN3, 2, 1)[::3, 0].tolist() == heads[8:]


def test_transformer_engines_fused_norms_are_found() -> None:
    rows = convert.table(QWEN3, True)
    convert.held(rows, parameters(QWEN3, fused_norms=True))
    at = {row.names[0]: row.parameter for row in rows}
    assert at["model.layers.1.input_layernorm.weight"] == "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    assert at["model.layers.1.post_attention_layernorm.weight"] == "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"


def test_a_parameter_without_a_conversion_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no conversion for decoder\.layers\.0\.mlp\.router\.weight"):
        convert.held(convert.table(QWEN3, False), [*parameters(QWEN3), "decoder.layers.0.mlp.router.weight"])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.architecture)
def test_every_parameter_has_one_row(shape: hf.Shape) -> None:
    rows = convert.table(shape, False)
    assert convert.held(rows, parameters(shape)) == rows


MOE = replace(QWEN3, architecture="qwen3_moe", experts=4, experts_per_token=2, expert_size=5)


def test_stages_and_expert_ranks_hold_each_tensor_once() -> None:
    """Two layers over two stages, four experts over two ranks; a tied model's last stage has its own copy of the embedding."""
    rows = convert.table(MOE, False, pp=2, ep=2)
    names = [name for row in rows if not row.copy for name in row.names]
    assert len(names) == len(set(names))
    assert set(names) == {name for row in convert.table(MOE, False) for name in row.names}
    at = {row.names[0]: row for row in rows if not row.copy}
    expert = at["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert (expert.parameter, expert.stage, expert.expert_rank) == (
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", 1, 1,
    )  # fmt: skip
    assert convert.hf_shapes(MOE, expert) == [(8, 5)]
    assert convert.hf_shapes(MOE, at["model.layers.0.mlp.gate.weight"]) == [(4, 8)]
    (copy,) = [row for row in rows if row.copy]
    assert (copy.parameter, copy.names, copy.stage) == ("output_layer.weight", ("model.embed_tokens.weight",), 1)
    whole = tensors(MOE, rows)
    for row in rows:
        for name, back in convert.to_hf([convert.to_megatron(whole, row, MOE, 1, 0)], row, MOE):
            assert torch.equal(back, whole[name])


def test_a_tensor_of_another_shape_is_named() -> None:
    rows = convert.table(QWEN3, False)
    whole = tensors(QWEN3, rows) | {"model.embed_tokens.weight": torch.zeros(14, 8)}
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight: shape \(14, 8\), but config.json says \(13, 8\)"):
        convert.to_megatron(whole, rows[0], QWEN3, 1, 0)


def write_config(folder: Path, **change: object) -> Path:
    config = {
        "model_type": "qwen3",
        "vocab_size": 13,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 3,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    return folder


def test_shape_is_read_from_old_and_new_rope_keys(tmp_path: Path) -> None:
    assert hf.read_shape(write_config(tmp_path)) == QWEN3
    assert hf.read_shape(write_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5.0})).rope_theta == 5.0
    scaled = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert hf.read_shape(write_config(tmp_path, rope_scaling=scaled)).rope == hf.Llama3Rope(8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type = 'mixtral' is not known"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_type = 'yarn' cannot be trained"),
        ({"attention_bias": True}, "attention_bias = True cannot be trained"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' cannot be trained"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] cannot be trained"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_file_and_key(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        hf.read_shape(write_config(tmp_path, **change))
    assert str(error.value).startswith(str(tmp_path / "config.json"))


def test_experts_are_read_under_the_names_of_transformers_4_and_5(tmp_path: Path) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 5}
    assert hf.read_shape(write_config(tmp_path, **experts, num_experts=4)) == MOE
    assert hf.read_shape(write_config(tmp_path, **experts, num_local_experts=4)) == MOE


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        hf.read_shape(tmp_path / "nowhere")


def test_sharded_files_are_read_by_name_and_a_missing_one_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, str(tmp_path / "one.safetensors"))
    save_file({"b": torch.zeros(3)}, str(tmp_path / "two.safetensors"))
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    read = hf.Tensors(tmp_path)
    assert set(read) == {"a", "b"} and torch.equal(read["a"], torch.ones(2))
    with pytest.raises(ValueError, match="c is in none of its safetensors"):
        read["c"]
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ValueError, match=r"two\.safetensors is missing"):
        hf.Tensors(tmp_path)


def test_a_written_folder_has_weights_config_and_tokenizer_but_not_old_weights(tmp_path: Path) -> None:
    source, to = tmp_path / "source", tmp_path / "to"
    source.mkdir()
    write_config(source, torch_dtype="bfloat16")
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"old")
    both = torch.arange(6.0)
    hf.write_folder(to, source, [[("a", both[:3]), ("b", both[3:])]], "float32")  # views of one storage
    assert sorted(p.name for p in to.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert torch.equal(hf.Tensors(to)["b"], both[3:])
    config = json.loads((to / "config.json").read_text())
    assert config["dtype"] == "float32" and "torch_dtype" not in config
    hf.write_folder(to, source, [[("a", both)], [("b", both)]], "float32")  # over the older one, in two files
    assert sorted(p.name for p in to.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert torch.equal(hf.Tensors(to)["b"], both)


@pytest.mark.parametrize(
    ("shape", "cut", "words"),
    [
        (QWEN3, {"tp": 3}, "training.tp = 3 does not divide the model's 8 attention heads"),
        (QWEN3, {"tp": 8}, "training.tp = 8 does not divide the model's 4 key-value heads"),
        (QWEN3, {"pp": 3}, "training.pp = 3 does not divide the model's 2 layers"),
        (QWEN3, {"ep": 2}, "training.ep = 2, but the model has no experts; wanted: 1"),
        (MOE, {"ep": 3}, "training.ep = 3 does not divide the model's 4 experts"),
        (MOE, {"tp": 2}, "training.tp = 2: a model with experts is cut by ep, pp and cp; wanted: 1"),
    ],
)
def test_layouts_that_do_not_cut_evenly_are_refused(shape: hf.Shape, cut: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError) as error:
        convert.check_layout(shape, Training.model_validate(cut))
    assert str(error.value) == words


def test_layouts_that_cut_evenly_are_not() -> None:
    convert.check_layout(MOE, Training.model_validate({"ep": 4, "pp": 2}))
    convert.check_layout(QWEN3, Training.model_validate({"tp": 4, "pp": 2, "cp": 5}))

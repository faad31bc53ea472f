"""Which Hugging Face tensors make which megatron-core parameter, and back?

Megatron fuses q, k, v (interleaved by query group) and gate, up, and cuts what it can over tensor-parallel ranks. Both
directions only move numbers, so a round trip is bit-exact. Pure torch: a parameter here is a name and a `Row`.

How a row is cut: `whole` everywhere the same, `rows` dim 0, `columns` dim 1, `vocab` dim 0 padded to a multiple of tp,
`qkv` whole query groups, `glu` the same part of gate and of up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from rpipe.training.hf import Shape

How = Literal["whole", "rows", "columns", "vocab", "qkv", "glu"]


@dataclass(frozen=True, slots=True)
class Row:
    parameter: str  # megatron's name
    names: tuple[str, ...]  # Hugging Face's
    how: How


def table(shape: Shape, parameters: Collection[str]) -> list[Row]:
    """One row per parameter, in one fixed order. `parameters` are the model's own names: Transformer Engine's layers
    hold a norm inside the linear that follows it. Raises ValueError where a parameter is left without a row."""
    rows = [Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")]
    for i in range(shape.layers):
        rows += _layer(shape, parameters, f"decoder.layers.{i}.", f"model.layers.{i}.")
    rows.append(Row("decoder.final_layernorm.weight", ("model.norm.weight",), "whole"))
    if not shape.tied:
        rows.append(Row("output_layer.weight", ("lm_head.weight",), "vocab"))
    differ = {row.parameter for row in rows} ^ set(parameters)
    if differ:
        raise ValueError(f"no conversion for {', '.join(sorted(differ)[:4])}")
    return rows


def _layer(shape: Shape, own: Collection[str], m: str, h: str) -> list[Row]:
    attention, mlp = m + "self_attention.", m + "mlp."

    def norm(plain: str, fused: str, name: str) -> Row:
        return Row(plain if plain in own else fused, (name,), "whole")

    q, k, v = (f"{h}self_attn.{x}_proj." for x in "qkv")
    rows = [
        norm(m + "input_layernorm.weight", attention + "linear_qkv.layer_norm_weight", h + "input_layernorm.weight"),
        Row(attention + "linear_qkv.weight", (q + "weight", k + "weight", v + "weight"), "qkv"),
    ]
    if shape.qkv_bias:
        rows.append(Row(attention + "linear_qkv.bias", (q + "bias", k + "bias", v + "bias"), "qkv"))
    if shape.qk_norm:
        rows.append(Row(attention + "q_layernorm.weight", (h + "self_attn.q_norm.weight",), "whole"))
        rows.append(Row(attention + "k_layernorm.weight", (h + "self_attn.k_norm.weight",), "whole"))
    return [
        *rows,
        Row(attention + "linear_proj.weight", (h + "self_attn.o_proj.weight",), "columns"),
        norm(m + "pre_mlp_layernorm.weight", mlp + "linear_fc1.layer_norm_weight", h + "post_attention_layernorm.weight"),
        Row(mlp + "linear_fc1.weight", (h + "mlp.gate_proj.weight", h + "mlp.up_proj.weight"), "glu"),
        Row(mlp + "linear_fc2.weight", (h + "mlp.down_proj.weight",), "columns"),
    ]


def hf_shapes(shape: Shape, row: Row) -> list[tuple[int, ...]]:
    """The whole tensors' shapes, in the order of `row.names`."""
    s, name = shape, row.names[0]
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    if row.how == "qkv":
        return [(q,), (kv,), (kv,)] if name.endswith("bias") else [(q, s.hidden_size), (kv, s.hidden_size), (kv, s.hidden_size)]
    if row.how == "glu":
        return [(s.intermediate_size, s.hidden_size)] * 2
    if row.how == "vocab":
        return [(s.vocab_size, s.hidden_size)]
    if row.how == "columns":
        return [(s.hidden_size, q if "self_attn" in name else s.intermediate_size)]
    return [(s.head_dim,) if "self_attn" in name else (s.hidden_size,)]


def padded_vocab(shape: Shape, tp: int) -> int:
    return -(-shape.vocab_size // tp) * tp


def to_megatron(tensors: Mapping[str, torch.Tensor], row: Row, shape: Shape, tp: int, rank: int) -> torch.Tensor:
    """Whole tensors -> what tensor-parallel rank `rank` holds of `row.parameter`."""
    t = [tensors[name] for name in row.names]
    for name, found, wanted in zip(row.names, t, hf_shapes(shape, row)):
        if tuple(found.shape) != wanted:
            raise ValueError(f"{name}: shape {tuple(found.shape)}, but config.json says {wanted}")
    if row.how == "whole":
        return t[0]
    if row.how == "qkv":  # per query group: its q heads, its k head, its v head
        grouped = torch.cat([x.view(shape.kv_heads, -1, shape.head_dim, *x.shape[1:]) for x in t], 1)
        return grouped.chunk(tp, 0)[rank].flatten(0, 2)
    if row.how == "glu":
        return torch.cat([x.chunk(tp, 0)[rank] for x in t])
    if row.how == "vocab":
        t[0] = F.pad(t[0], (0, 0, 0, padded_vocab(shape, tp) - shape.vocab_size))
    return t[0].chunk(tp, 1 if row.how == "columns" else 0)[rank]


def to_hf(parts: Sequence[torch.Tensor], row: Row, shape: Shape) -> list[tuple[str, torch.Tensor]]:
    """Every tensor-parallel rank's parameter (in rank order) -> whole tensors; views where nothing had to move."""
    one = parts[0]
    if row.how == "qkv":
        whole = one if len(parts) == 1 else torch.cat(list(parts))
        q = shape.heads // shape.kv_heads
        grouped = whole.view(shape.kv_heads, q + 2, shape.head_dim, *whole.shape[1:])
        t = [grouped[:, :q], grouped[:, q : q + 1], grouped[:, q + 1 :]]
        return [(name, x.flatten(0, 2)) for name, x in zip(row.names, t)]
    if row.how == "glu":
        halves = [p.chunk(2, 0) for p in parts]
        return [
            (name, halves[0][i] if len(parts) == 1 else torch.cat([h[i] for h in halves])) for i, name in enumerate(row.names)
        ]
    if row.how != "whole" and len(parts) > 1:
        one = torch.cat(list(parts), 1 if row.how == "columns" else 0)
    return [(row.names[0], one[: shape.vocab_size] if row.how == "vocab" else one)]

"""Which Hugging Face tensors make which megatron-core parameter, and back?

Megatron fuses q, k, v (interleaved by query group) and gate, up, and cuts what it can over tensor-parallel ranks. Both
directions only move numbers, so a round trip is bit-exact. A parameter here is a name and a `Row`.

How a row is cut over tensor parallelism: `whole` everywhere the same, `columns` dim 1, `vocab` dim 0 padded to a multiple
of tp, `qkv` whole query groups, `glu` the same part of gate and of up. A pipeline stage holds its layers' rows, an
expert-parallel rank its experts'.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rpipe.config import Training
from rpipe.training.hf import Shape

if TYPE_CHECKING:  # imported where tensors are moved: the launcher asks the table how much memory a model takes, without torch
    import torch

How = Literal["whole", "columns", "vocab", "qkv", "glu"]


@dataclass(frozen=True, slots=True)
class Row:
    parameter: str  # megatron's name on the ranks that hold it
    names: tuple[str, ...]  # Hugging Face's
    how: How
    stage: int = 0  # of the pipeline
    expert_rank: int | None = None  # None: on every one
    copy: bool = False  # a second copy of another row's tensor: read, never written


def table(shape: Shape, fused_norms: bool, pp: int = 1, ep: int = 1) -> list[Row]:
    """One row per parameter of the whole model, in one fixed order. `fused_norms`: Transformer Engine's layers hold a norm
    inside the linear that follows it."""
    rows = [Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")]
    each = shape.layers // pp
    for i in range(shape.layers):
        rows += [
            replace(row, stage=i // each)
            for row in _layer(shape, fused_norms, ep, f"decoder.layers.{i % each}.", f"model.layers.{i}.")
        ]
    rows.append(Row("decoder.final_layernorm.weight", ("model.norm.weight",), "whole", pp - 1))
    if not shape.tied:
        rows.append(Row("output_layer.weight", ("lm_head.weight",), "vocab", pp - 1))
    elif pp > 1:  # the last stage has its own copy of the embedding; megatron adds up both gradients
        rows.append(Row("output_layer.weight", ("model.embed_tokens.weight",), "vocab", pp - 1, copy=True))
    return rows


def held(rows: Sequence[Row], parameters: Collection[str], stage: int = 0, expert_rank: int = 0) -> list[Row]:
    """The rows of one stage and expert-parallel rank. Raises ValueError where they are not exactly its `parameters`."""
    mine = [row for row in rows if row.stage == stage and row.expert_rank in (None, expert_rank)]
    differ = {row.parameter for row in mine} ^ set(parameters)
    if differ:
        raise ValueError(f"no conversion for {', '.join(sorted(differ)[:4])}")
    return mine


def _layer(shape: Shape, fused_norms: bool, ep: int, m: str, h: str) -> list[Row]:
    attention, mlp = m + "self_attention.", m + "mlp."

    def norm(plain: str, fused: str, name: str) -> Row:
        return Row(fused if fused_norms else plain, (name,), "whole")

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
    rows.append(Row(attention + "linear_proj.weight", (h + "self_attn.o_proj.weight",), "columns"))
    before, after = m + "pre_mlp_layernorm.weight", h + "post_attention_layernorm.weight"
    if not shape.experts:
        return [*rows, norm(before, mlp + "linear_fc1.layer_norm_weight", after), *_mlp(mlp, h + "mlp.")]
    rows += [Row(before, (after,), "whole"), Row(mlp + "router.weight", (h + "mlp.gate.weight",), "whole")]
    each = shape.experts // ep
    for e in range(shape.experts):
        expert = _mlp(f"{mlp}experts.local_experts.{e % each}.", f"{h}mlp.experts.{e}.")
        rows += [replace(row, expert_rank=e // each) for row in expert]
    return rows


def _mlp(m: str, h: str) -> list[Row]:
    return [
        Row(m + "linear_fc1.weight", (h + "gate_proj.weight", h + "up_proj.weight"), "glu"),
        Row(m + "linear_fc2.weight", (h + "down_proj.weight",), "columns"),
    ]


def hf_shapes(shape: Shape, row: Row) -> list[tuple[int, ...]]:
    """The whole tensors' shapes, in the order of `row.names`."""
    s, name = shape, row.names[0]
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    if row.how == "qkv":
        return [(q,), (kv,), (kv,)] if name.endswith("bias") else [(q, s.hidden_size), (kv, s.hidden_size), (kv, s.hidden_size)]
    width = s.expert_size if row.expert_rank is not None else s.intermediate_size
    if row.how == "glu":
        return [(width, s.hidden_size)] * 2
    if row.how == "vocab":
        return [(s.vocab_size, s.hidden_size)]
    if row.how == "columns":
        return [(s.hidden_size, q if "self_attn" in name else width)]
    if name.endswith("mlp.gate.weight"):
        return [(s.experts, s.hidden_size)]
    return [(s.head_dim,) if "self_attn" in name else (s.hidden_size,)]


def padded_vocab(shape: Shape, tp: int) -> int:
    return -(-shape.vocab_size // tp) * tp


def check_layout(shape: Shape, training: Training) -> None:
    """Raises ValueError where the layout does not cut the model evenly."""
    tp, pp, ep = training.tp, training.pp, training.ep
    for what, n in (
        ("attention heads", shape.heads),
        ("key-value heads", shape.kv_heads),
        ("MLP columns", shape.intermediate_size),
    ):
        if n % tp:
            raise ValueError(f"training.tp = {tp} does not divide the model's {n} {what}")
    rows = padded_vocab(shape, tp) // tp
    if rows * (tp - 1) >= shape.vocab_size:
        raise ValueError(f"training.tp = {tp} leaves a rank without a token of a vocabulary of {shape.vocab_size}")
    if shape.layers % pp:
        raise ValueError(f"training.pp = {pp} does not divide the model's {shape.layers} layers")
    if ep > 1 and not shape.experts:
        raise ValueError(f"training.ep = {ep}, but the model has no experts; wanted: 1")
    if shape.experts % ep:
        raise ValueError(f"training.ep = {ep} does not divide the model's {shape.experts} experts")
    if shape.experts and tp > 1:
        raise ValueError(f"training.tp = {tp}: a model with experts is cut by ep, pp and cp; wanted: 1")


def to_megatron(tensors: Mapping[str, torch.Tensor], row: Row, shape: Shape, tp: int, rank: int) -> torch.Tensor:
    """Whole tensors -> what tensor-parallel rank `rank` holds of `row.parameter`."""
    import torch
    from torch.nn.functional import pad

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
        t[0] = pad(t[0], (0, 0, 0, padded_vocab(shape, tp) - shape.vocab_size))
    return t[0].chunk(tp, 1 if row.how == "columns" else 0)[rank]


def to_hf(parts: Sequence[torch.Tensor], row: Row, shape: Shape) -> list[tuple[str, torch.Tensor]]:
    """Every tensor-parallel rank's parameter (in rank order) -> whole tensors; views where nothing had to move."""
    import torch

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

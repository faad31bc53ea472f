"""Does it fit? What each role's ranks will hold, estimated before anything is started.

Parameters are counted exactly, from the conversion table; gradients, optimizer states and kept copies follow from them.
Activations are what megatron's layers save for backward, in elements a token; the logits are those of one chunk. docs/memory.md
derives the figures and compares them with measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rpipe.config import Config
from rpipe.training import convert
from rpipe.training.hf import Shape
from rpipe.training.trainer import BYTES

# What a process holds before it has a model: interpreter, libraries; on an accelerator its context and communicators.
PROCESS_BYTES = {"cpu": 450 << 20, "cuda": 2 << 30, "npu": 2 << 30}
ENGINE_CPU_BYTES = 1 << 30  # an SGLang server on a CPU is three processes
SCRIPTED_ENGINE_CPU_BYTES = 300 << 20  # 278 MiB measured: its rank has torch for the broadcast, and no model
FIT = 0.95  # of the device may be planned for: allocators fragment


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes by purpose, of the rank that needs most."""

    role: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def line(self) -> str:
        parts = ", ".join(f"{name} {_readable(size)}" for name, size in self.parts.items() if size)
        return f"{self.role}: {_readable(self.total)} a rank ({parts})"


def needs(config: Config, shape: Shape) -> list[Need]:
    """Of a training rank, then of an engine's."""
    return [training(config, shape), engine(config, shape)]


def problem(config: Config, found: Sequence[Need], device_bytes: int, hosts: Sequence[str]) -> str:
    """Why it does not fit, in one line; empty where it does. On a CPU the ranks of a host share what it has, with
    cluster.share_device its first device; `hosts` are all ranks', rollout first."""
    most, accelerator = int(device_bytes * FIT), config.cluster.accelerator
    if accelerator != "cpu" and not config.cluster.share_device:
        for need in found:
            if need.total > most:
                there = f"does not fit a device of {_readable(device_bytes)}"
                return f"{need.line()} {there}; {_advice(need, accelerator)}"
        return ""
    train, serve = found
    for host in dict.fromkeys(hosts):
        roles = [i >= config.cluster.rollout_ranks for i, name in enumerate(hosts) if name == host]
        engines = sum(not trains for trains in roles) // config.engine.tp
        there, on_it, advice = host, config.engine.tp, _advice(train, accelerator)
        if accelerator != "cpu":  # an engine's other ranks have the next devices
            there, on_it, advice = f"the first device of {host}", 1, "try cluster.share_device = false: a device for each rank"
        total = sum(roles) * train.total + engines * serve.total * on_it
        if total > most:
            return (
                f"{sum(roles)} training ranks and {engines} engines on {there} want {_readable(total)} of its"
                f" {_readable(device_bytes)}: {train.line()}; {serve.line()}; {advice}"
            )
    return ""


def training(config: Config, shape: Shape) -> Need:
    t, size = config.training, BYTES[config.dtype]
    dense, experts = parameters(config, shape)
    held = dense + experts
    replicas = config.cluster.training_ranks // (t.tp * t.pp)  # dp x cp, over which the optimizer is cut
    master = 4 if config.dtype == "bfloat16" else 0  # float32 weights beside the others
    states = (8 + master) * (dense // replicas + experts // max(replicas // t.ep, 1))
    copies = (config.pipeline.old_logprob == "pinned") + (t.loss.kl_coefficient > 0)
    # host memory holds offloaded states between steps; at a step they are here and the activations are not
    activations = _activations(config, shape)
    moving = max(activations, states) if t.optimizer.offload else activations + states
    vocabulary = convert.padded_vocab(shape, t.tp) // t.tp
    logits = 3 * 4 * t.logprob_chunk_tokens * vocabulary + 4 * vocabulary * shape.hidden_size
    name = "optimizer or activations" if t.optimizer.offload else "optimizer"
    parts = {"weights": held * size, "gradients": held * 4, name: moving if t.optimizer.offload else states}
    if not t.optimizer.offload:
        parts["activations"] = activations
    return Need(
        "training",
        {
            **parts,
            "kept copies": copies * held * size,
            "logits": logits,
            "process": PROCESS_BYTES[config.cluster.accelerator],
        },
    )


def parameters(config: Config, shape: Shape) -> tuple[int, int]:
    """(dense, expert) parameters of the pipeline stage that holds most."""
    t = config.training
    stages = [[0, 0] for _ in range(t.pp)]
    for row in convert.table(shape, False, t.pp, t.ep):
        if row.expert_rank not in (None, 0):
            continue
        count = sum(math.prod(size) for size in convert.hf_shapes(shape, row))
        if row.how == "vocab":
            count = convert.padded_vocab(shape, t.tp) * shape.hidden_size
        stages[row.stage][row.expert_rank is not None] += count if row.how == "whole" else count // t.tp
    dense, experts = max(stages, key=sum)
    return dense, experts


def _activations(config: Config, shape: Shape) -> int:
    """Of the micro-batches that a first pipeline stage has in flight."""
    t, size = config.training, BYTES[config.dtype]
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if config.engine.context_tokens is not None:
        longest = min(longest, config.engine.context_tokens)
    tokens = max(t.micro_batch_tokens, longest) // t.cp
    layers = shape.layers // t.pp
    heads, keys = shape.heads * shape.head_dim // t.tp, shape.kv_heads * shape.head_dim // t.tp
    # saved a token: both norms' inputs and outputs; q, k, v before and after the rotation; what attention gives, twice; fc1's
    # output, its activation and their product
    width = shape.expert_size * shape.experts_per_token if shape.experts else shape.intermediate_size // t.tp
    layer = 4 * shape.hidden_size + 2 * (heads + 2 * keys) + 2 * heads + 4 * width
    if shape.experts:
        layer += 2 * shape.hidden_size * shape.experts_per_token + shape.experts  # dispatched and returned
    each = layers * shape.hidden_size + layer if t.recompute == "full" else layers * layer
    return t.pp * tokens * each * size


def engine(config: Config, shape: Shape) -> Need:
    """Of one of an engine's ranks; a KV cache whose size is not given takes what the engine finds."""
    size, tp = BYTES[config.dtype], config.engine.tp
    if config.engine.kind == "scripted":
        return Need("engine", {"process": SCRIPTED_ENGINE_CPU_BYTES if config.cluster.accelerator == "cpu" else 0})
    held = sum(math.prod(s) for row in convert.table(shape, False) if not row.copy for s in convert.hf_shapes(shape, row))
    token = 2 * shape.layers * -(-shape.kv_heads // tp) * shape.head_dim * size
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    context = min(longest, config.engine.context_tokens or shape.max_positions)
    tokens = config.engine.kv_tokens or context  # at least one trajectory must fit
    bucket = min(config.channel.weight_bucket_bytes, held * size)
    cpu = config.cluster.accelerator == "cpu"
    return Need(
        "engine",
        {
            "weights": held * size // tp,
            "KV cache": tokens * token,
            "a bucket of new weights": bucket,
            "process": ENGINE_CPU_BYTES + PROCESS_BYTES["cpu"] if cpu else PROCESS_BYTES[config.cluster.accelerator],
        },
    )


def _advice(need: Need, accelerator: str) -> str:
    """What to change, for its largest part."""
    largest = max(need.parts, key=lambda name: need.parts[name])
    return {
        "activations": "try training.recompute = full, a smaller training.micro_batch_tokens, or cp",
        "optimizer": "try more training ranks" + ("" if accelerator == "cpu" else ", or training.optimizer.offload"),
        "optimizer or activations": "try training.recompute = full, or more training ranks",
        "logits": "try a smaller training.logprob_chunk_tokens, or tp",
        "KV cache": "try a smaller engine.kv_tokens, or engine.tp",
    }.get(largest, "try a larger tp or pp, or a smaller model")


def _readable(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"

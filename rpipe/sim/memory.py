"""What does a layout keep on each accelerator, in bytes? From the model's sizes alone, without its files: for the planner.

    trainer   weights + gradients (fp32 sums) + optimizer (a part on each data-parallel rank) + kept copies of the weights
              + activations of the micro-batches in flight + a chunk of logits; an offloaded optimizer only while it steps,
              when there are no activations
    engine    weights + KV cache

`rpipe.training.memory` counts exactly what a given model's files say, before a job starts; this is the same arithmetic on
averages, and tests/unit/test_memory_of_plans.py holds the two together. Of the fullest pipeline stage, with the longest
micro-batch, experts evenly used.
"""

from __future__ import annotations

from dataclasses import dataclass

from rpipe.config import Config
from rpipe.sim.shape import Shape

FIT = 0.95  # of an accelerator may be planned for: allocators fragment
PROCESS_BYTES = 2 << 30  # context, libraries, communicators
GRADIENT_BYTES = 4  # a parameter: summed in fp32
MOMENT_BYTES = 8  # a parameter: two fp32 moments
MASTER_BYTES = 4  # a parameter: the fp32 weight, where the model computes in less
HIDDEN_PER_LAYER = 4  # of a token's hidden size, kept by a layer for backward: both norms' inputs and outputs
KEPT_PER_OUTPUT = 1.5  # kept for each value that a layer's matrices give: 2 of attention's, 4 / 3 of the MLP's
LOGIT_COPIES = 3  # fp32 logits of a chunk, their softmax, its gradient


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on the fullest accelerator."""

    weights: float
    gradients: float
    optimizer: float
    copies: float  # pinned and reference weights
    activations: float
    logits: float
    offloaded: bool = False

    @property
    def total(self) -> float:
        moving = max(self.activations, self.optimizer) if self.offloaded else self.activations + self.optimizer
        return self.weights + self.gradients + self.copies + moving + self.logits + PROCESS_BYTES


def trainer_memory(config: Config, shape: Shape) -> TrainerMemory:
    t = config.training
    ep = t.ep
    dense, experts, ends = shape.dense_parameters, shape.parameters - shape.dense_parameters, shape.end_parameters
    fullest = ends if t.pp == 1 or shape.tied else ends / 2  # a tied one is held by the first and the last stage
    held_dense = ((dense - ends) / t.pp + fullest) / t.tp
    held_experts = experts / t.pp / ep
    held = held_dense + held_experts
    replicas = config.cluster.training_ranks // (t.tp * t.pp)  # dp x cp, over which the optimizer is cut
    master = 0 if shape.bytes_per_value == 4 else MASTER_BYTES
    copies = (config.pipeline.old_logprob == "pinned") + (t.loss.kl_coefficient > 0)
    return TrainerMemory(
        weights=held * shape.bytes_per_value,
        gradients=held * GRADIENT_BYTES,
        optimizer=(held_dense / replicas + held_experts * ep / replicas) * (MOMENT_BYTES + master),
        copies=copies * held * shape.bytes_per_value,
        activations=_activations(config, shape),
        logits=4 * (LOGIT_COPIES * t.logprob_chunk_tokens + shape.hidden_size) * shape.vocabulary / t.tp,
        offloaded=t.optimizer.offload,
    )


def _activations(config: Config, shape: Shape) -> float:
    """What backward needs of the micro-batches that the first pipeline stage has in flight."""
    t = config.training
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = max(t.micro_batch_tokens, longest) / t.cp
    outputs = shape.active_layer_parameters / shape.hidden_size  # of all matrices of a layer, a token
    layer = KEPT_PER_OUTPUT * outputs / t.tp + HIDDEN_PER_LAYER * shape.hidden_size
    if shape.experts > 1:
        layer += 2 * shape.hidden_size * shape.experts_per_token  # to the experts and back
    layers = shape.layers / t.pp
    recomputed = t.recompute == "full"
    kept = layers * shape.hidden_size + layer if recomputed else layers * layer
    return t.pp * tokens * kept * shape.bytes_per_value


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on each accelerator of an engine."""

    weights: float
    kv_cache: float
    kv_tokens: int  # of the whole engine

    @property
    def total(self) -> float:
        return self.weights + self.kv_cache


def engine_memory(config: Config, shape: Shape, kv_tokens: int) -> EngineMemory:
    """`kv_tokens` as rpipe.sim.costs finds them. A key-value head is held whole: more ranks than heads hold copies."""
    tp = config.engine.tp
    return EngineMemory(
        weights=shape.weight_bytes / tp,
        kv_cache=kv_tokens * shape.kv_bytes_per_token / min(tp, shape.kv_heads),
        kv_tokens=kv_tokens,
    )

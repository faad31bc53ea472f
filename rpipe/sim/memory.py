"""What does a layout keep on each accelerator, in bytes? Pure arithmetic, for the planner and for checks before a start.

    trainer   weights + gradients (fp32 sums) + optimizer (a part on each data-parallel rank) + kept copies of the weights
              + what is greater: the activations of the micro-batches in flight and a chunk of logits, or, where the optimizer
              is offloaded, the optimizer while it steps
    engine    weights + KV cache

An estimate: of the fullest pipeline stage, with the longest micro-batch, each tensor-parallel rank holding whole what lies
between layers (no sequence parallelism), experts evenly used. Allocator and kernels take some more: HEADROOM.
"""

from __future__ import annotations

from dataclasses import dataclass

from rpipe.config import Config
from rpipe.control.training import AHEAD
from rpipe.sim.shape import Shape

HEADROOM = 0.1  # of an accelerator: context, communication buffers, fragmentation; assumed, not measured
GRADIENT_BYTES = 4  # a parameter: summed in fp32
MOMENT_BYTES = 8  # a parameter: two fp32 moments
MASTER_BYTES = 4  # a parameter: the fp32 weight, where the model computes in less
HIDDEN_PER_LAYER = 6  # values of a token's hidden size that a layer keeps for backward: residuals, norms in and out
KEPT_PER_OUTPUT = 1.5  # values kept for each one that a layer's matrices put out: they, and what activation and rotation make
LOGIT_COPIES = 3  # fp32 logits of a chunk, their softmax, its gradient


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on the fullest accelerator."""

    weights: float
    gradients: float
    optimizer: float
    copies: float  # pinned and reference weights, buckets of a publish
    activations: float
    logits: float
    offloaded: bool = False

    @property
    def total(self) -> float:
        passing = self.activations + self.logits
        moving = max(passing, self.optimizer) if self.offloaded else passing + self.optimizer
        return self.weights + self.gradients + self.copies + moving


def trainer_memory(config: Config, shape: Shape) -> TrainerMemory:
    t, dp = config.training, config.cluster.training_ranks // (config.training.tp * config.training.pp * config.training.cp)
    ep = getattr(t, "ep", 1)
    embedding = shape.vocabulary * shape.hidden_size
    dense, experts = shape.dense_parameters, shape.parameters - shape.dense_parameters
    ends = min(2 * embedding, dense / 2) if t.pp == 1 else min(embedding, dense / 2)  # what the fullest stage has of both ends
    stage_dense = ((dense - min(2 * embedding, dense / 2)) / t.pp + ends) / t.tp
    stage_experts = experts / t.pp / ep
    held = stage_dense + stage_experts
    master = 0 if shape.bytes_per_value == 4 else MASTER_BYTES
    sharded = stage_dense / (dp * t.cp) + stage_experts * ep / (dp * t.cp)
    copies = (config.pipeline.old_logprob == "pinned") + (config.training.loss.kl_coefficient > 0)
    return TrainerMemory(
        weights=held * shape.bytes_per_value,
        gradients=held * GRADIENT_BYTES,
        optimizer=sharded * (MOMENT_BYTES + master),
        copies=copies * held * shape.bytes_per_value + config.channel.weight_bucket_bytes,
        activations=_activations(config, shape, ep),
        logits=LOGIT_COPIES * 4 * t.logprob_chunk_tokens * shape.vocabulary / t.tp,
        offloaded=getattr(t.optimizer, "offload", False),
    )


def _activations(config: Config, shape: Shape, ep: int) -> float:
    """What backward needs of the micro-batches that a stage has in flight."""
    t = config.training
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = max(t.micro_batch_tokens / ep, longest) / t.cp
    outputs = shape.active_layer_parameters / shape.hidden_size  # of all matrices of a layer, a token
    layer = KEPT_PER_OUTPUT * outputs / t.tp + HIDDEN_PER_LAYER * shape.hidden_size
    layers, in_flight = shape.layers / t.pp, min(t.pp, AHEAD)
    if getattr(t, "recompute", "none") == "full":
        kept = layers * in_flight * shape.hidden_size + layer
    else:
        kept = layers * in_flight * layer
    return tokens * kept * shape.bytes_per_value


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

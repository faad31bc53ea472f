"""What does rpipe ask of a trainer?

A trainer is the same object on every training rank. Ranks that must run equal counts form a lockstep domain: tp x pp x cp,
times ep where experts are cut over ranks. The ranks of one domain call `accumulate` with the same micro-batches in the same
order (under expert parallelism the domain's data-parallel peers share each micro-batch among themselves); domains may call
it a different number of times, even never. `replica` below, and all over rpipe, is the index of a lockstep domain.
All ranks meet in `begin_step`, `finish_step`, `weight_buckets`, `save` and `load`. Implemented by `megatron.MegatronTrainer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rpipe.core.types import Sequences

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimizer step, the same on every rank. Means are over the step's trained tokens."""

    skipped: bool  # a gradient was not finite: weights are unchanged
    loss: float
    grad_norm: float  # before clipping
    learning_rate: float
    entropy: float  # nats
    clip_fraction: float
    kl: float  # training.loss.kl_estimator's, to the reference; 0 where none is kept
    logprob_gap_mean: float  # |log-prob given - log-prob now|, over trained tokens
    logprob_gap_max: float
    trained_tokens: int
    sequences: int


WeightSpec = tuple[str, str, tuple[int, ...]]  # Hugging Face name, dtype, shape
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def cut(specs: Sequence[WeightSpec], limit_bytes: int) -> list[list[WeightSpec]]:
    """Consecutive buckets of at most `limit_bytes`; a larger tensor has one of its own. Both ends of the broadcast cut so."""
    buckets: list[list[WeightSpec]] = []
    room = 0
    for spec in specs:
        nbytes = math.prod(spec[2]) * BYTES[spec[1]]
        if not buckets or nbytes > room:
            buckets.append([])
            room = limit_bytes
        buckets[-1].append(spec)
        room -= nbytes
    return buckets


class Trainer(Protocol):
    @property
    def replica(self) -> int:
        """Which lockstep domain this rank belongs to."""
        ...

    @property
    def replicas(self) -> int: ...

    def begin_step(self) -> None:
        """Zero the gradient buffers and the sums."""
        ...

    def accumulate(self, batches: Sequence[Sequences]) -> None:
        """Forward and backward of these micro-batches, in one pipeline schedule: under pipeline parallelism the more are
        given at once, the smaller the bubble. The loss is a SUM, nothing is scaled or reduced."""
        ...

    def finish_step(self) -> StepStats:
        """Reduce, divide once by the step's denominator over all replicas, clip, step, advance the schedule."""
        ...

    def weight_buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Whole tensors under Hugging Face names, in one fixed order, a bucket at a time; tensors are valid on rank 0."""
        ...

    def weight_specs(self) -> list[WeightSpec]:
        """(name, dtype, shape) of what `weight_buckets` yields, in its order."""
        ...

    def export_grads(self) -> dict[str, torch.Tensor]:
        """This replica's accumulated, unreduced gradients (sums) under Hugging Face names, whole over tp."""
        ...

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        """Model, optimizer, schedule and random state; `extra` is JSON. Complete or absent, never half."""
        ...

    def load(self, directory: Path) -> dict[str, Any]:
        """The inverse, under any tp and dp; returns `extra`."""
        ...

    def export_hf(self, directory: Path) -> None:
        """Weights, config and tokenizer as transformers reads them."""
        ...

"""How do a megatron model's parameters come from and go to Hugging Face names?

Whole tensors in one fixed order, one at a time: nothing gathers the model in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpipe.training import convert
from rpipe.training.hf import Shape
from rpipe.training.trainer import cut

Named = list[tuple[str, torch.Tensor]]


class Weights:
    """One model's, on one tensor-parallel rank."""

    def __init__(self, model: torch.nn.Module, shape: Shape) -> None:
        self._parameters = dict(model.named_parameters())
        self._shape = shape
        self._rows = convert.table(shape, self._parameters)
        self._group = mpu.get_tensor_model_parallel_group()
        self._tp, self._rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()

    @torch.no_grad()
    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what is this rank's of each tensor. Raises ValueError for one that is missing or of another shape."""
        for row in self._rows:
            self._parameters[row.parameter].copy_(convert.to_megatron(tensors, row, self._shape, self._tp, self._rank))

    def specs(self, dtype: str) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, dtype, size) for row in self._rows for name, size in zip(row.names, convert.hf_shapes(self._shape, row))]

    def buckets(self, limit_bytes: int) -> Iterator[Named]:
        """All weights; a tensor above the limit has a bucket of its own. Tensor-parallel ranks iterate together."""
        whole = (named for row in self._rows for named in self._whole(self._parameters[row.parameter].detach(), row))
        dtype = str(next(iter(self._parameters.values())).dtype).removeprefix("torch.")
        for bucket in cut(self.specs(dtype), limit_bytes):
            yield list(islice(whole, len(bucket)))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of what has accumulated, not reduced over replicas. Tensor-parallel ranks call it together."""
        grads: dict[str, torch.Tensor] = {}
        for row in self._rows:
            grad = self._parameters[row.parameter].main_grad.clone()
            if self._tp > 1 and row.parameter.endswith(("q_layernorm.weight", "k_layernorm.weight")):
                dist.all_reduce(grad, group=self._group)  # each rank saw its own heads only
            grads.update(self._whole(grad, row))
        return grads

    def _whole(self, mine: torch.Tensor, row: convert.Row) -> Named:
        parts = [mine]
        if self._tp > 1 and row.how != "whole":
            parts = [torch.empty_like(mine) for _ in range(self._tp)]
            dist.all_gather(parts, mine.contiguous(), group=self._group)
        return convert.to_hf(parts, row, self._shape)

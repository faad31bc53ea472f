"""How do a megatron model's parameters come from and go to Hugging Face names?

Whole tensors in one fixed order, one at a time: nothing gathers the model in one place. A tensor that lies on another
pipeline stage or expert-parallel rank is sent to its domain's first rank, which is where whole tensors come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpipe.training import convert
from rpipe.training.hf import Shape
from rpipe.training.layout import Layout
from rpipe.training.trainer import cut

Named = list[tuple[str, torch.Tensor]]


class Weights:
    """One model's, on one rank."""

    def __init__(self, model: torch.nn.Module, shape: Shape, layout: Layout) -> None:
        self._parameters = dict(model.named_parameters())
        self._shape, self._layout = shape, layout
        fused = any(name.endswith("linear_qkv.layer_norm_weight") for name in self._parameters)
        self._rows = convert.table(shape, fused, layout.pp, layout.ep)
        self._mine = convert.held(self._rows, self._parameters, layout.stage, layout.ep_rank)
        self._group = mpu.get_tensor_model_parallel_group()
        self.whole_here = layout.rank() == dist.get_rank()  # whether whole tensors come out on this rank

    @torch.no_grad()
    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what is this rank's of each tensor. Raises ValueError for one that is missing or of another shape."""
        for row in self._mine:
            part = convert.to_megatron(tensors, row, self._shape, self._layout.tp, self._layout.tp_rank)
            self._parameters[row.parameter].copy_(part)

    def specs(self, dtype: str) -> list[tuple[str, str, tuple[int, ...]]]:
        written = [row for row in self._rows if not row.copy]
        return [(name, dtype, size) for row in written for name, size in zip(row.names, convert.hf_shapes(self._shape, row))]

    def buckets(self, limit_bytes: int) -> Iterator[Named]:
        """All weights; a tensor above the limit has a bucket of its own. The ranks of a domain iterate together, and only
        where `whole_here` do the tensors hold anything."""
        whole = self._whole(lambda name: self._parameters[name].detach())
        dtype = str(next(iter(self._parameters.values())).dtype).removeprefix("torch.")
        for bucket in cut(self.specs(dtype), limit_bytes):
            yield list(islice(whole, len(bucket)))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of what has accumulated in this domain, not reduced over others. The ranks of a domain call it together;
        empty where not `whole_here`."""
        layout = self._layout
        summed: dict[str, torch.Tensor] = {}
        for row in self._mine:
            grad = summed[row.parameter] = self._parameters[row.parameter].main_grad.clone()
            if layout.tp > 1 and row.parameter.endswith(("q_layernorm.weight", "k_layernorm.weight")):
                dist.all_reduce(grad, group=self._group)  # each rank saw its own heads only
            if layout.cp > 1:
                dist.all_reduce(grad, group=mpu.get_context_parallel_group())
            if layout.ep > 1 and row.expert_rank is None:
                dist.all_reduce(grad, group=mpu.get_expert_model_parallel_group())
            if self._shape.tied and layout.pp > 1 and row.how == "vocab":
                dist.all_reduce(grad, group=mpu.get_embedding_group())
        found = list(self._whole(summed.__getitem__))
        return dict(found) if self.whole_here else {}

    def _whole(self, get: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every Hugging Face tensor in order: on the domain's first rank as it is, elsewhere empty or the rank's own."""
        layout, me = self._layout, dist.get_rank()
        dtype, device = next((p.dtype, p.device) for p in map(get, self._parameters))
        nothing = torch.empty(0, dtype=dtype, device=device)
        for row in self._rows:
            if row.copy:
                continue
            owner = layout.rank(row.stage, row.expert_rank or 0)
            here = row.stage == layout.stage and row.expert_rank in (None, layout.ep_rank)
            named = self._joined(get(row.parameter), row) if here else [(name, nothing) for name in row.names]
            if owner != layout.rank():
                if self.whole_here:
                    sizes = convert.hf_shapes(self._shape, row)
                    named = [(name, torch.empty(n, dtype=dtype, device=device)) for name, n in zip(row.names, sizes)]
                    for _, tensor in named:
                        dist.recv(tensor, src=owner)
                elif me == owner:
                    for _, tensor in named:
                        dist.send(tensor.contiguous(), dst=layout.rank())
            yield from named

    def _joined(self, mine: torch.Tensor, row: convert.Row) -> Named:
        parts = [mine]
        if self._layout.tp > 1 and row.how != "whole":
            parts = [torch.empty_like(mine) for _ in range(self._layout.tp)]
            dist.all_gather(parts, mine.contiguous(), group=self._group)
        return convert.to_hf(parts, row, self._shape)

"""How does megatron-core run on a torch without CUDA?

Megatron calls torch.cuda and names device="cuda" unconditionally. `enable` gives those calls their CPU meaning; every
one of them would raise here otherwise, but for `Tensor.type` (its optimizers dispatch on the names torch.cuda.X). It
does nothing where CUDA exists, or where Ascend's adaptor plays CUDA. Written against megatron-core 0.16.1.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = (
    "zeros", "ones", "empty", "full", "tensor", "arange", "randn", "rand", "zeros_like", "ones_like", "empty_like",
    "as_tensor", "linspace",
)  # fmt: skip


def enable() -> bool:
    """Patch torch and megatron.core for the CPU; True where that was needed. Calling it again is harmless."""
    if torch.cuda.is_available():
        _name_what_is_absent()
        return False
    # megatron.core decorates with torch.compile at import: not needed here, and inductor wants a compiler
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if torch.cuda.current_device is not _current_device:
        _patch_torch()
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
    import megatron.core.tensor_parallel.random as tracker
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    _name_what_is_absent()

    tracker._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    tracker._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # it makes sizes numpy arrays on their way from a GPU: tensors would be no sizes to all_to_all
    dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, record_stream=False: (
        x.numpy() if as_numpy and torch.is_tensor(x) else x
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "__dict__", {}).get("torch") is torch:
            module.torch = _stand_in  # type: ignore[attr-defined]
    return True


def _name_what_is_absent() -> None:
    """Without Transformer Engine the router looks for a name that 0.16.1 defines with it only, on any device."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _current_device() -> torch.device:
    return CPU


class _Stream:
    """CPU work is in order already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return self if event is None else event

    def synchronize(self) -> None: ...
    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...


def _patch_torch() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = _current_device  # megatron passes it on as device=
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.Stream = cuda.current_stream = cuda.default_stream = cuda.stream = _Stream
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = module.cuda = lambda self, *args, **kwargs: self
    plain_type = tensor.type

    def type_as_cuda(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return plain_type(self, dtype, *args, **kwargs)
        return plain_type(self).replace("torch.", "torch.cuda.", 1)

    tensor.type = type_as_cuda


class _TorchOnCpu(types.ModuleType):
    """Stands in for the global `torch` of megatron's modules alone: factories read device="cuda" as the CPU."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in FACTORIES:
            value = _on_cpu(value)
        setattr(self, name, value)
        return value


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return call


_stand_in = _TorchOnCpu("torch")

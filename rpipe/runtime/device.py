"""Which accelerator is this rank's, and how is it spoken to?

The only module that knows accelerators. Everything else holds a `torch.device` and asks here. Order matters:
`prepare` before anything imports megatron (Ascend's adaptor patches it at import), `select` before the first
collective (a process group binds to the current device).
"""

from __future__ import annotations

import importlib
import os
import random
import resource
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from rpipe.runtime import host

Accelerator = Literal["cpu", "cuda", "npu"]

_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "LOCAL_RANK")


class DeviceError(RuntimeError):
    """The machine lacks what the config asked for; one line says what."""


def prepare(accelerator: Accelerator) -> None:
    """Import what must come before megatron. Raises DeviceError where it is not installed."""
    if accelerator != "npu":
        return
    for module, what in (("torch_npu", "Ascend's PyTorch plug-in"), ("mindspeed.megatron_adaptor", "MindSpeed")):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise DeviceError(f"cluster.accelerator = npu wants {module} ({what}): {error}") from None


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """This process's place on its node, as the MPI launcher says; 0 where none does."""
    environ = os.environ if environ is None else environ
    return next((int(environ[name]) for name in _LOCAL_RANK if name in environ), 0)


def select(accelerator: Accelerator, index: int | None = None) -> torch.device:
    """Make device `index` (default: the local rank's) the current one and return it."""
    if accelerator == "cpu":
        return torch.device("cpu")
    module = _module(accelerator)
    if module is None or not module.is_available():
        raise DeviceError(f"cluster.accelerator = {accelerator}, but torch sees none here (`rpipe doctor` says more)")
    index, count = local_rank() if index is None else index, module.device_count()
    if index >= count:
        raise DeviceError(f"rank {index} of this node has no {accelerator} device: {count} visible; start one rank a device")
    module.set_device(index)
    return torch.device(accelerator, index)


def current(accelerator: Accelerator) -> torch.device:
    """The device that `select` chose."""
    return torch.device("cpu") if accelerator == "cpu" else torch.device(accelerator, _module(accelerator).current_device())


def synchronize(device: torch.device) -> None:
    """Wait until the device finished what it was given."""
    if device.type != "cpu":
        _module(device.type).synchronize(device)


def memory_bytes(accelerator: Accelerator) -> int:
    """What this rank's accelerator has, or the host for all its processes. Makes no device current: an engine's owner must not
    touch it."""
    if accelerator != "cpu":
        return int(_module(accelerator).get_device_properties(local_rank()).total_memory)
    return host.memory_bytes()


def peak_bytes(accelerator: Accelerator) -> int:
    """The most that this process has held: on the accelerator, or resident in host memory on a CPU."""
    if accelerator != "cpu":  # 0 in a process that did not touch it
        return int(_module(accelerator).max_memory_allocated()) if _module(accelerator).is_initialized() else 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seed(value: int) -> None:
    """Seed python, numpy, torch and the accelerator."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)  # reaches CUDA and, with torch_npu imported, NPU generators


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """torch's generators, as CPU byte tensors."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = _module(device.type).get_rng_state(device).cpu()
    return state


def restore_random_state(device: torch.device, state: dict[str, torch.Tensor]) -> None:
    """The inverse; a state saved on another kind of device restores its CPU part only."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and "device" in state:
        _module(device.type).set_rng_state(state["device"], device)


def _module(accelerator: str) -> Any:
    return getattr(torch, accelerator, None)

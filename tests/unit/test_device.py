"""Is this rank's device found, and what is missing named?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from rpipe.runtime import device


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, 0),
        ({"SLURM_LOCALID": "3"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, 2),
    ],  # mpirun in an allocation
)
def test_local_rank_is_the_launchers(environ: dict[str, str], wanted: int) -> None:
    """The last: mpirun inside a Slurm allocation."""
    assert device.local_rank(environ) == wanted


def test_cpu_needs_nothing() -> None:
    device.prepare("cpu")
    assert device.select("cpu") == device.current("cpu") == torch.device("cpu")
    device.synchronize(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_an_accelerator_that_is_not_there_is_named() -> None:
    with pytest.raises(device.DeviceError, match=r"cluster\.accelerator = cuda, but torch sees none here"):
        device.select("cuda")
    with pytest.raises(device.DeviceError, match=r"cluster\.accelerator = npu"):
        device.select("npu")


def test_random_state_comes_back() -> None:
    device.seed(3)
    state = device.random_state(torch.device("cpu"))
    first = torch.rand(2)
    device.restore_random_state(torch.device("cpu"), state)
    assert torch.equal(torch.rand(2), first)


def recorded(count: int) -> SimpleNamespace:
    """torch.cuda's own signatures (torch_npu's `torch.npu` has the same functions), without a device behind them."""
    names = ("is_available", "device_count", "set_device", "current_device", "synchronize", "get_rng_state", "set_rng_state")
    module = SimpleNamespace(**{name: create_autospec(getattr(torch.cuda, name)) for name in names})
    module.is_available.return_value, module.device_count.return_value = True, count
    module.current_device.return_value = 3
    module.get_rng_state.return_value = torch.arange(4, dtype=torch.uint8)
    return module


@pytest.mark.parametrize("accelerator", ["cuda", "npu"])
def test_an_accelerator_is_spoken_to_as_its_torch_module_wants(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if accelerator == "npu":  # torch knows the name once torch_npu has registered it; any stand-in does here
        monkeypatch.setattr(torch, "device", lambda kind, index=None: SimpleNamespace(type=kind, index=index))
    module = recorded(count=8)
    monkeypatch.setattr(torch, accelerator, module, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    chosen = device.select(accelerator)
    module.set_device.assert_called_once_with(3)
    assert (chosen.type, chosen.index) == (accelerator, 3)
    assert device.current(accelerator).index == 3
    device.synchronize(chosen)
    module.synchronize.assert_called_once_with(chosen)
    state = device.random_state(chosen)
    device.restore_random_state(chosen, state)
    module.set_rng_state.assert_called_once_with(state["device"], chosen)


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", recorded(count=2))
    with pytest.raises(device.DeviceError, match="rank 2 of this node has no cuda device: 2 visible"):
        device.select("cuda", 2)

"""Is this rank's device found, and what is missing named?"""

from __future__ import annotations

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

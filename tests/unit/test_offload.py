"""Where are an offloaded optimizer's float32 weights while a step's activations need the device?

No accelerator is here: a stand-in for megatron's optimizer says where its tensors were sent.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rpipe.config import Optimizer as Settings
from rpipe.training import optimizer

DEVICE = torch.device("cuda")


class Placed:
    """A tensor, as far as its place goes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to(self, device: torch.device, non_blocking: bool = False) -> Placed:
        return Placed(device)


class Inner:
    """Megatron's, just made: float32 weights lie on the device, and there are no moments."""

    def __init__(self) -> None:
        self.weight = SimpleNamespace(data=Placed(DEVICE))
        self.shard_fp32_from_float16_groups = [[self.weight, None]]
        self.optimizer = SimpleNamespace(state={})

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"weight": self.weight.data.device.type}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(offload) -> the optimizer and what it wraps."""

    def make(offload: bool) -> tuple[optimizer.Optimizer, Inner]:
        inner = Inner()
        monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda *_: inner)
        monkeypatch.setattr(optimizer, "OptimizerParamScheduler", lambda *_, **__: None)
        monkeypatch.setattr(optimizer, "_fix_torch_adam", lambda: None)
        model: Any = None
        return optimizer.Optimizer(model, Settings(offload=offload), 10, torch.bfloat16, DEVICE), inner

    return make


def test_they_wait_in_host_memory_from_the_first_step_on_and_again_when_a_state_was_taken(made: Any) -> None:
    one, inner = made(offload=True)
    assert inner.weight.data.device.type == "cpu", "before the first step"
    assert one.sharded_state({}, False, {}) == {"0": {"weight": "cuda"}}
    one.rest()
    assert inner.weight.data.device.type == "cpu", "after a checkpoint"


def test_they_stay_where_they_are_unless_offloaded(made: Any) -> None:
    one, inner = made(offload=False)
    one.rest()
    assert inner.weight.data.device == DEVICE

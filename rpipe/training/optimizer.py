"""How do gradients become weights?

AdamW behind megatron's distributed optimizer (each data-parallel rank keeps the moments of its part), the learning-rate
schedule beside it. A gradient that is not finite changes nothing: not a weight, not a moment, not the schedule.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from rpipe.config import Optimizer as Settings

SHARDING = "fully_reshardable"  # the one sharding that reloads exactly under any tp and dp


class Optimizer:
    """One optimizer over all parameters of one model."""

    def __init__(
        self, model: DistributedDataParallel, settings: Settings, total_steps: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`total_steps` of the run; a cosine ends there. Raises ValueError where the schedule cannot be."""
        if settings.minimum_learning_rate > settings.learning_rate:
            raise ValueError(
                f"training.optimizer.minimum_learning_rate = {settings.minimum_learning_rate:g}"
                f" is above learning_rate = {settings.learning_rate:g}"
            )
        if settings.schedule == "cosine" and settings.warm_up_steps >= total_steps:
            raise ValueError(
                f"training.optimizer.warm_up_steps = {settings.warm_up_steps} leaves nothing of the run's {total_steps} steps"
            )
        _fix_torch_adam()
        self.settings = settings
        self._device, self._rest = device, torch.device("cpu") if settings.offload else device
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            min_lr=settings.minimum_learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.epsilon,
            clip_grad=settings.clip_grad_norm,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        chain = get_megatron_optimizer(config, [model])
        # experts that are cut over ranks have an optimizer of their own: their gradients meet fewer peers
        self._parts: list[Any] = list(getattr(chain, "chained_optimizers", [chain]))
        self._inner = chain if len(self._parts) > 1 else self._parts[0]
        # it also carries the weight-decay multipliers: without a schedule norms and biases would be decayed
        self._schedule = OptimizerParamScheduler(
            self._inner,
            init_lr=0.0,
            max_lr=settings.learning_rate,
            min_lr=settings.minimum_learning_rate,
            lr_warmup_steps=settings.warm_up_steps,
            lr_decay_steps=max(total_steps, settings.warm_up_steps + 1),
            lr_decay_style=settings.schedule,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )
        self.rest()  # a first step's activations come before its moments

    def zero_grad(self) -> None:
        self._inner.zero_grad()

    def step(self, learning_rate: float | None = None) -> tuple[bool, float, float]:
        """Apply the reduced gradients: (applied, gradient norm before clipping, learning rate used).

        Step k (from 1) uses the schedule's value at k, so warm-up's first step already moves. `learning_rate` overrules
        the schedule, which then stays where it is. All ranks get the same answer: the norm is over all of them.
        """
        inner = self._inner
        self._bring(self._device)
        with torch.no_grad():
            inner.prepare_grads()
            norm = float(inner.get_grad_norm())
            for part in self._parts:
                if part.get_parameters():
                    clip_grad_by_total_norm_fp32(part.get_parameters(), self.settings.clip_grad_norm, norm)
        if not math.isfinite(norm):
            self.rest()
            return False, norm, float(inner.param_groups[0]["lr"])
        if learning_rate is None:
            self._schedule.step(1)
        else:
            for group in inner.param_groups:
                group["lr"], group["weight_decay"] = learning_rate, 0.0
        inner.step_with_ready_grads()
        self.rest()
        return True, norm, float(inner.param_groups[0]["lr"])

    def rest(self) -> None:
        """Offloaded: moments and float32 weights go where they wait. After `sharded_state`, once its state is written."""
        self._bring(self._rest)

    def _bring(self, device: torch.device) -> None:
        """Moments and float32 weights to where they are needed, or where they wait; nothing moves unless offloaded."""
        if self._device == self._rest:
            return
        for part in self._parts:
            for group in part.shard_fp32_from_float16_groups:
                for param in group:
                    if param is not None:
                        param.data = param.data.to(device, non_blocking=False)
            for state in part.optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        state[key] = value.to(device)

    def reset(self) -> None:
        """Forget all moments and start the schedule again; weights stay."""
        for part in self._parts:
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                group.pop("step", None)  # where Transformer Engine's and apex's Adam count
        self._set_steps(0)

    def moments(self) -> list[torch.Tensor]:
        """This rank's Adam moments; empty before the first step."""
        states = [state for part in self._parts for state in part.optimizer.state.values()]
        return [value for state in states for key, value in state.items() if key in ("exp_avg", "exp_avg_sq")]

    @property
    def steps(self) -> int:
        """How far the schedule is."""
        return int(self._schedule.num_steps)

    def _set_steps(self, steps: int) -> None:
        self._schedule.num_steps = steps
        self._schedule.step(0)

    def sharded_state(self, model_state: dict[str, Any], loading: bool, metadata: dict[str, Any]) -> dict[str, Any]:
        """By part: one, or the dense parameters' and the experts'. Tensors' keys say nothing of parts, so that a checkpoint
        goes on where experts are cut otherwise. Offloaded ones are on the device from here until `rest`."""
        self._bring(self._device)
        return {
            str(i): part.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)
            for i, part in enumerate(self._parts)
        }

    def load(self, state: dict[str, Any], steps: int) -> None:
        saved = [group for part in state.values() for group in part.get("optimizer", {}).get("param_groups", [])]
        for i, part in enumerate(self._parts):
            own = part.optimizer.param_groups
            groups = [{**_like(group, saved), "is_expert_parallel": group["is_expert_parallel"]} for group in own]
            tensors = state[str(i)]["param_state"]
            part.load_state_dict(
                {"optimizer": {"param_groups": groups}, "param_state": tensors, "param_state_sharding_type": SHARDING}
            )
        self._set_steps(steps)
        self.rest()


def _like(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The saved group of parameters with the same multipliers, whichever part of the optimizer held it."""
    keys = ("wd_mult", "lr_mult", "is_decoupled_lr")
    return next(other for other in saved if all(other[key] == group[key] for key in keys))


def _fix_torch_adam() -> None:
    """megatron-core 0.16.1 over torch's AdamW (neither apex nor Transformer Engine): make its checkpoints work.

    As it stands, saving asserts before the first step, loading looks for a `step` that fully_reshardable stores apart,
    and after loading all parameters share one step tensor, which torch then advances once per parameter.
    """
    cls: Any = DistributedOptimizer
    if HAVE_APEX_OR_TE or getattr(cls, "_rpipe_fixed", False):
        return
    load, save = cls.load_state_dict, cls.state_dict

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        param = self.optimizer.param_groups[group]["params"][order]
        for key, value in {"param": param, **self.optimizer.state[param]}.items():
            if key in tensors:
                value.copy_(tensors[key])

    def load_state_dict(self: Any, state: Any) -> None:
        load(self, state)
        for each in self.optimizer.state.values():
            each["step"] = each["step"].clone()

    def state_dict(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if not self.optimizer.state[param]:
                    blank = {"exp_avg": torch.zeros_like(param.data), "exp_avg_sq": torch.zeros_like(param.data)}
                    self.optimizer.state[param].update(step=torch.tensor(0.0), **blank)
        return save(self)

    cls._set_main_param_and_optimizer_states = set_states
    cls.load_state_dict = load_state_dict
    cls.state_dict = state_dict
    cls._rpipe_fixed = True

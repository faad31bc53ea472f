"""How does megatron-core train while groups are still arriving?

One object per training rank. Gradients of every micro-batch add up in float32 as sums, on each rank for itself; the
step's end reduces them over the replicas, divides once by what the step turned out to hold, clips and steps. Lockstep
domains (`layout.py`) may have run different numbers of micro-batches, even none.

                       meets whom
   begin_step          nobody
   accumulate          the ranks of its lockstep domain
   finish_step         every training rank
   weight_buckets      the ranks of domain 0
   save, load,         every training rank
   export_hf, warm_up

`rpipe.runtime.device.prepare` and `select` come first, then torch.distributed's default world, then this.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rpipe.training import megatron_cpu

# what megatron lacks here (`rpipe doctor` says it once) and what it calls that torch renames, at every start
for module in ("megatron", r"torch\.distributed"):
    warnings.filterwarnings("ignore", module=module)
megatron_cpu.enable()

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402

from rpipe.config import Config, Loss  # noqa: E402
from rpipe.core.types import Sequences  # noqa: E402
from rpipe.policy.batching import Item, pack  # noqa: E402
from rpipe.runtime import device as devices  # noqa: E402
from rpipe.training import checkpoint, convert, hf, layout, loss  # noqa: E402
from rpipe.training import model as models  # noqa: E402
from rpipe.training.optimizer import SHARDING, Optimizer  # noqa: E402
from rpipe.training.passes import Parameters, Passes  # noqa: E402
from rpipe.training.stats import Sums  # noqa: E402
from rpipe.training.trainer import StepStats  # noqa: E402
from rpipe.training.weights import Named, Weights  # noqa: E402

HF_FILE_BYTES = 5 << 30
SUPERVISED = Loss(aggregation="token_mean", kl_coefficient=0.0)


class MegatronTrainer:
    """Implements `rpipe.training.trainer.Trainer`."""

    def __init__(self, config: Config, model_dir: Path) -> None:
        """Raises ValueError, in one line, for a model or a layout that cannot be trained."""
        training = config.training
        self.config, self.model_dir = config, Path(model_dir)
        self.device = devices.current(config.cluster.accelerator)
        if self.device.type == "cpu":
            torch.set_num_threads(config.cluster.threads_per_rank)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.shape = hf.read_shape(self.model_dir)
        convert.check_layout(self.shape, training)
        self.layout = layout.meet(training)
        tensor_parallel.model_parallel_cuda_manual_seed(config.run.seed, force_reset_rng=True)

        self.megatron_config = models.transformer_config(self.shape, training, self.device, self.dtype)
        first = self.layout.stage == 0
        self.model = models.build(self.shape, self.megatron_config, self.device, first, self.layout.last)
        self.weights = Weights(self.model, self.shape, self.layout)
        self.weights.read(hf.Tensors(self.model_dir))
        reduction = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        self._ddp = DistributedDataParallel(self.megatron_config, reduction, self.model)
        # the schedule reduces nothing on its own: finish_step does, once
        self.megatron_config.finalize_model_grads_func, self.megatron_config.no_sync_func = None, contextlib.nullcontext
        total_steps = config.run.iterations * config.steps_per_iteration
        self.optimizer = Optimizer(self._ddp, training.optimizer, total_steps, self.dtype, self.device)
        rows = convert.padded_vocab(self.shape, training.tp) // training.tp
        start = rows * self.layout.tp_rank
        group = mpu.get_tensor_model_parallel_group() if training.tp > 1 else None
        vocabulary = loss.VocabularyShard(start, min(rows, self.shape.vocab_size - start), group)
        self._passes = Passes(config, self.model, self._ddp, self.layout, vocabulary)
        self._sums = Sums()
        self._reference: Parameters | None = None
        self._pinned: Parameters | None = None
        self._keep_round_start()

    @property
    def replica(self) -> int:
        return self.layout.domain

    @property
    def replicas(self) -> int:
        return self.layout.domains

    # ---- one optimizer step -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._sums = Sums()

    def accumulate(self, batches: Sequence[Sequences]) -> None:
        aggregation, sums = self._passes.settings.aggregation, self._sums
        for batch in batches if self.layout.counts else ():
            sums.trained_tokens += batch.trained_tokens
            sums.sequences += batch.count
            sums.denominator += loss.denominator(aggregation, batch.trained_tokens, batch.count)
        # without a trained token there is nothing to learn, and no peer waits: the domain holds the same batch
        shares = self._passes.shares([batch for batch in batches if batch.trained_tokens])
        if shares:
            self._passes.train(shares, sums, self._pinned, self._reference)

    def finish_step(self) -> StepStats:
        return self._finish(None)

    def _finish(self, learning_rate: float | None) -> StepStats:
        total = self._sums.over_ranks(self.layout.speaking(dist.get_world_size()), self.device)
        count = torch.tensor(int(self._sums.denominator), dtype=torch.int, device=self.device)
        finalize_model_grads([self._ddp], count)
        if total.trained_tokens:
            applied, norm, rate = self.optimizer.step(learning_rate)
        else:  # not one trained token anywhere
            applied, norm, rate = True, 0.0, 0.0  # a step of empty responses is no fault
        return total.told(applied, norm, rate)

    # ---- log-probs --------------------------------------------------------------------------------------------------

    def logprobs(self, batch: Sequences) -> NDArray[np.float32]:
        """[T], this trainer's own at the rollout temperature, 0 where `loss_mask` is 0. A domain's ranks call it together."""
        return self._passes.whole_logprobs(dict(self.model.named_parameters()), batch)

    def _copied(self, kept: Parameters | None) -> Parameters:
        """The weights as they are now, in the memory of an older copy where there is one."""
        if kept is None:
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                kept[name].copy_(p)
        return kept

    def _keep_round_start(self) -> None:
        """Copies of the weights as they are now, where the config asks for them."""
        if self.config.training.loss.kl_coefficient:
            self._reference = self._copied(self._reference)
        if self.config.pipeline.old_logprob == "pinned":
            self._pinned = self._copied(self._pinned)

    # ---- weights out ------------------------------------------------------------------------------------------------

    def weight_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return self.weights.specs(self.config.dtype)

    def weight_buckets(self, bucket_bytes: int) -> Iterator[Named]:
        """The ranks of domain 0 iterate together, and rank 0 has whole tensors; elsewhere there is nothing to iterate. Views
        of the parameters where nothing had to move: consume a bucket before the next step. To ask is to publish: what
        `pipeline.old_logprob = pinned` compares with is taken here, on every rank."""
        if self._pinned is not None:
            self._pinned = self._copied(self._pinned)
        return iter(()) if self.replica else self.weights.buckets(bucket_bytes)

    def export_grads(self) -> dict[str, torch.Tensor]:
        return self.weights.gradients()

    def export_hf(self, directory: Path) -> None:
        buckets = self.weights.buckets(HF_FILE_BYTES)
        if dist.get_rank() == 0:
            hf.write_folder(Path(directory), self.model_dir, buckets, self.config.dtype)
        elif not self.replica:
            for _ in buckets:  # rank 0's peers
                pass
        dist.barrier()

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        """`extra` must be the same on all ranks."""
        common = {"steps": self.optimizer.steps, "extra": json.dumps(extra), "random": devices.random_state(self.device)}
        try:
            checkpoint.save(Path(directory), {**self._sharded(loading=False), **common})
        finally:
            self.optimizer.rest()

    def load(self, directory: Path) -> dict[str, Any]:
        if self._reference is not None and not checkpoint.holds(Path(directory), "reference."):
            raise ValueError(
                f"{directory}: holds no reference weights: it was saved with training.loss.kl_coefficient = 0;"
                " wanted: that again, or another run.dir"
            )
        state = checkpoint.load(Path(directory), self._sharded(loading=True))
        self.model.load_state_dict(state["model"])
        self.optimizer.load(state["optimizer"], int(state["steps"]))
        devices.restore_random_state(self.device, state["random"])
        if self._pinned is not None:
            self._pinned = self._copied(self._pinned)
        if self._reference is not None:
            self._reference = state["reference"]
        extra: dict[str, Any] = json.loads(state["extra"])
        return extra

    def _sharded(self, loading: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": SHARDING,
            "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        }
        model = self.model.sharded_state_dict(metadata=metadata)
        state = {"model": model, "optimizer": self.optimizer.sharded_state(model, loading, metadata)}
        if self._reference is not None:
            state["reference"] = self._sharded_reference(metadata)
        return state

    def _sharded_reference(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """The reference as the model's own sharding describes it, under keys of its own."""
        assert self._reference is not None
        inside = torch.nn.utils.stateless._reparametrize_module  # what functional_call uses; state dicts see the swap
        with inside(self.model, dict(self._reference)):
            sharded: dict[str, Any] = self.model.sharded_state_dict(prefix="reference.", metadata=metadata)
        return {name.removeprefix("reference."): value for name, value in sharded.items()}

    # ---- supervised warm-up -----------------------------------------------------------------------------------------

    def warm_up(self, batches: Iterable[Sequences], learning_rate: float, micro_batch_tokens: int) -> float:
        """One supervised step per batch, at a constant rate; returns the last one's loss (nats a token).

        All training ranks pass the same batches and each takes its replica's share. Afterwards the optimizer is as
        new: reinforcement starts with zero moments and its schedule's first step. References are taken again.
        """
        last = float("nan")
        self._passes.settings = SUPERVISED
        pinned, self._pinned = self._pinned, None
        try:
            for batch in batches:
                self.begin_step()
                share = list(range(self.replica, batch.count, self.replicas))
                items = [Item(0, row, int(batch.lengths[row])) for row in share]
                packed = pack(items, micro_batch_tokens)
                self.accumulate([batch.select([item.sample for item in rows]) for rows in packed])
                last = self._finish(learning_rate).loss
        finally:
            self._passes.settings, self._pinned = self.config.training.loss, pinned
        self.optimizer.reset()
        self._keep_round_start()
        return last

"""How does megatron-core train while groups are still arriving?

One object per training rank. Gradients of every micro-batch add up in float32 as sums, on each rank for itself; the
step's end reduces them over the replicas, divides once by what the step turned out to hold, clips and steps. Replicas
may have run different numbers of micro-batches, even none.

                       meets whom
   begin_step          nobody
   accumulate          the tensor-parallel ranks of its replica
   finish_step         every training rank
   weight_buckets      replica 0's tensor-parallel ranks
   save, load,         every training rank
   export_hf, warm_up

`rpipe.runtime.device.prepare` and `select` come first, then torch.distributed's default world, then this.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from rpipe.config import Config, Loss  # noqa: E402
from rpipe.core.types import Sequences  # noqa: E402
from rpipe.policy.batching import Item, pack  # noqa: E402
from rpipe.runtime import device as devices  # noqa: E402
from rpipe.training import attention, checkpoint, convert, hf, loss  # noqa: E402
from rpipe.training import batch as batches_  # noqa: E402
from rpipe.training import model as models  # noqa: E402
from rpipe.training.optimizer import SHARDING, Optimizer  # noqa: E402
from rpipe.training.stats import Sums  # noqa: E402
from rpipe.training.trainer import StepStats  # noqa: E402
from rpipe.training.weights import Named, Weights  # noqa: E402

HF_FILE_BYTES = 5 << 30
SUPERVISED = Loss(aggregation="token_mean", kl_coefficient=0.0)
Parameters = Mapping[str, torch.Tensor]


class MegatronTrainer:
    """Implements `rpipe.training.trainer.Trainer`."""

    def __init__(self, config: Config, model_dir: Path) -> None:
        """Raises ValueError, in one line, for a model or a layout that cannot be trained."""
        training = config.training
        for key in ("pp", "cp"):
            if getattr(training, key) > 1:
                raise ValueError(f"training.{key} = {getattr(training, key)}: comes later; wanted: 1")
        self.config, self.model_dir = config, Path(model_dir)
        self.device = devices.current(config.cluster.accelerator)
        if self.device.type == "cpu":
            torch.set_num_threads(config.cluster.threads_per_rank)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.shape = hf.read_shape(self.model_dir)
        models.check(self.shape, training.tp)
        _parallel_state(training.tp)
        self._tp, self._tp_rank = training.tp, mpu.get_tensor_model_parallel_rank()
        tensor_parallel.model_parallel_cuda_manual_seed(config.run.seed, force_reset_rng=True)

        self.megatron_config = models.transformer_config(self.shape, self._tp, self.device, self.dtype)
        self.model = models.build(self.shape, self.megatron_config, self.device)
        self.weights = Weights(self.model, self.shape)
        self.weights.read(hf.Tensors(self.model_dir))
        reduction = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        self._ddp = DistributedDataParallel(self.megatron_config, reduction, self.model)
        # the schedule reduces nothing on its own: finish_step does, once
        self.megatron_config.finalize_model_grads_func, self.megatron_config.no_sync_func = None, contextlib.nullcontext
        self._forward_backward = get_forward_backward_func()
        total_steps = config.run.iterations * config.steps_per_iteration
        self.optimizer = Optimizer(self._ddp, training.optimizer, total_steps, self.dtype)
        rows = convert.padded_vocab(self.shape, self._tp) // self._tp
        start = rows * self._tp_rank
        group = mpu.get_tensor_model_parallel_group() if self._tp > 1 else None
        self._vocabulary = loss.VocabularyShard(start, min(rows, self.shape.vocab_size - start), group)
        self._layout = models.attention_layout(self.device)
        self._loss = training.loss
        self._sums = Sums()
        self._reference: Parameters | None = None
        self._pinned: Parameters | None = None
        self._keep_round_start()

    @property
    def replica(self) -> int:
        return int(mpu.get_data_parallel_rank())

    @property
    def replicas(self) -> int:
        return int(mpu.get_data_parallel_world_size())

    # ---- one optimizer step -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._sums = Sums()

    def accumulate(self, batches: Sequence[Sequences]) -> None:
        for batch in batches:
            self._accumulate(batch)

    def _accumulate(self, batch: Sequences) -> None:
        settings, sums = self._loss, self._sums
        trained = batch.trained_tokens
        sums.trained_tokens += trained
        sums.sequences += batch.count
        sums.denominator += loss.denominator(settings.aggregation, trained, batch.count)
        if not trained:
            return  # nothing to learn from, and no tensor-parallel peer waits: they hold the same batch
        packed = batches_.make(batch, self.device)
        old = self._old_logprobs(packed)
        reference = self._logprobs_under(self._reference, packed) if settings.kl_coefficient and self._reference else None

        def forward(source: Iterator[batches_.Batch], model: Any) -> tuple[torch.Tensor, Any]:
            b = next(source)
            hidden = self._hidden(model, b)
            return hidden, lambda h: (self._token_loss(h, b, old, reference), torch.tensor(trained, dtype=torch.int), {})

        with self._ddp.no_sync():
            self._forward_backward(
                forward_step_func=forward,
                data_iterator=iter([packed]),
                model=[self._ddp],
                num_microbatches=1,
                seq_length=packed.input_ids.numel(),
                micro_batch_size=1,
            )

    def finish_step(self) -> StepStats:
        return self._finish(None)

    def _finish(self, learning_rate: float | None) -> StepStats:
        total = self._sums.over_replicas(self._tp, self.device)
        count = torch.tensor(int(self._sums.denominator), dtype=torch.int, device=self.device)
        finalize_model_grads([self._ddp], count)
        if total.denominator:
            applied, norm, rate = self.optimizer.step(learning_rate)
        else:  # not one trained token anywhere
            applied, norm, rate = True, 0.0, 0.0  # a step of empty responses is no fault
        return total.told(applied, norm, rate)

    def _hidden(self, model: Any, batch: batches_.Batch) -> torch.Tensor:
        packed = attention.pack(batch.lengths, self.device, self._layout)
        hidden: torch.Tensor = model(batch.input_ids, batch.positions, None, packed_seq_params=packed)
        return hidden.squeeze(1)

    def _token_loss(
        self, hidden: torch.Tensor, batch: batches_.Batch, old: torch.Tensor | None, reference: torch.Tensor | None
    ) -> torch.Tensor:
        settings, sums = self._loss, self._sums
        current, entropy = self._logprobs(hidden, self.model.output_weight, batch)
        values, clipped = loss.policy_loss(current, old, batch.advantages, settings.clip_low, settings.clip_high)
        now = current.detach()
        if reference is not None:
            divergence = loss.k3(current, reference)
            values = values + settings.kl_coefficient * divergence
            sums.kl += float(divergence.detach().sum())
        weights = loss.token_weights(batch.owner, batch.sequences, settings.aggregation, self.config.rollout.max_new_tokens)
        total = (values * weights).sum()
        gap = torch.zeros_like(now) if batch.given is None else (batch.given - now).abs()
        told = torch.stack([total.detach(), entropy.sum(), clipped.sum(), gap.sum(), gap.max()]).tolist()
        sums.loss += told[0]
        sums.entropy += told[1]
        sums.clipped += told[2]
        sums.gap += told[3]
        sums.gap_max = max(sums.gap_max, told[4])
        return total

    # ---- log-probs --------------------------------------------------------------------------------------------------

    def logprobs(self, batch: Sequences) -> NDArray[np.float32]:
        """[T], this trainer's own at the rollout temperature, 0 where `loss_mask` is 0. A replica's ranks call it together."""
        out = np.zeros(batch.tokens, np.float32)
        if batch.trained_tokens:
            packed = batches_.make(batch, self.device)
            out[packed.trained] = self._logprobs_under(dict(self.model.named_parameters()), packed).cpu().numpy()
        return out

    def _old_logprobs(self, batch: batches_.Batch) -> torch.Tensor | None:
        if batch.given is None or self._pinned is None:
            return batch.given
        return self._logprobs_under(self._pinned, batch)

    def _logprobs(self, hidden: torch.Tensor, weight: torch.Tensor, batch: batches_.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        rows = hidden.index_select(0, batch.hidden)
        return loss.token_logprobs(
            rows, weight, batch.targets, config.rollout.temperature, config.training.logprob_chunk_tokens, self._vocabulary
        )

    @torch.no_grad()
    def _logprobs_under(self, weights: Parameters, batch: batches_.Batch) -> torch.Tensor:
        def model(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self.model, dict(weights), args, kwargs)

        return self._logprobs(self._hidden(model, batch), weights[self.model.output_weight_name], batch)[0]

    def _snapshot(self) -> Parameters:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def _keep_round_start(self) -> None:
        """Copies of the weights as they are now, where the config asks for them."""
        if self.config.training.loss.kl_coefficient:
            self._reference = self._snapshot()
        if self.config.pipeline.old_logprob == "pinned":
            self._pinned = self._snapshot()

    # ---- weights out ------------------------------------------------------------------------------------------------

    def weight_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return self.weights.specs(self.config.dtype)

    def weight_buckets(self, bucket_bytes: int) -> Iterator[Named]:
        """On replica 0 its tensor-parallel ranks iterate together; elsewhere there is nothing to iterate. Views of the
        parameters where nothing had to move: consume a bucket before the next step. To ask is to publish: what
        `pipeline.old_logprob = pinned` compares with is taken here, on every rank."""
        if self._pinned is not None:
            self._pinned = self._snapshot()
        return iter(()) if self.replica else self.weights.buckets(bucket_bytes)

    def export_grads(self) -> dict[str, torch.Tensor]:
        return self.weights.gradients()

    def export_hf(self, directory: Path) -> None:
        buckets = self.weights.buckets(HF_FILE_BYTES)
        if dist.get_rank() == 0:
            hf.write_folder(Path(directory), self.model_dir, buckets, self.config.dtype)
        elif not self.replica:
            for _ in buckets:  # rank 0's tensor-parallel peers
                pass
        dist.barrier()

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        """`extra` must be the same on all ranks."""
        common = {"steps": self.optimizer.steps, "extra": json.dumps(extra), "random": devices.random_state(self.device)}
        checkpoint.save(Path(directory), {**self._sharded(loading=False), **common})

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
        self._keep_round_start()
        if "reference" in state:
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
        self._loss = SUPERVISED
        pinned, self._pinned = self._pinned, None
        try:
            for batch in batches:
                self.begin_step()
                share = list(range(self.replica, batch.count, self.replicas))
                items = [Item(0, row, int(batch.lengths[row])) for row in share]
                for rows in pack(items, micro_batch_tokens):
                    self.accumulate([batch.select([item.sample for item in rows])])
                last = self._finish(learning_rate).loss
        finally:
            self._loss, self._pinned = self.config.training.loss, pinned
        self.optimizer.reset()
        self._keep_round_start()
        return last


def _parallel_state(tp: int) -> None:
    """Megatron's groups over the default world; one layout a process."""
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(tp)
    elif mpu.get_tensor_model_parallel_world_size() != tp:
        raise ValueError(
            f"training.tp = {tp}, but this process already trains with tp = {mpu.get_tensor_model_parallel_world_size()}"
        )

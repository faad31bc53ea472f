"""How does a list of micro-batches go forward and backward through a model that may be cut over ranks?

Megatron's schedules do it: alone, or as a pipeline's stages. Log-probs under kept weights go first, without gradients;
then forward and backward with the loss at the last stage. Everything adds up: to gradients in megatron's buffers, to
figures in `Sums`. The ranks of a lockstep domain call all of this together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray

from rpipe.config import Config, Loss
from rpipe.core.types import Sequences
from rpipe.policy.batching import Item, owners
from rpipe.training import attention, loss
from rpipe.training import batch as batches_
from rpipe.training import model as models
from rpipe.training.batch import Batch
from rpipe.training.layout import Layout
from rpipe.training.model import PolicyModel
from rpipe.training.stats import Sums

Parameters = Mapping[str, torch.Tensor]


class Passes:
    """Of one model on one rank. `settings` is the loss; a warm-up changes it for a while."""

    def __init__(
        self, config: Config, model: PolicyModel, ddp: DistributedDataParallel, layout: Layout, vocabulary: loss.VocabularyShard
    ) -> None:
        self.config, self.model, self.layout = config, model, layout
        self.settings: Loss = config.training.loss
        self.device = next(model.parameters()).device
        self._ddp, self._vocabulary = ddp, vocabulary
        self._attention = models.attention_layout(self.device)
        self._forward_backward = get_forward_backward_func()

    def shares(self, batches: Sequence[Sequences]) -> list[Batch]:
        """What of each micro-batch is this rank's to run. Where experts are cut its domain's data-parallel peers share the
        trajectories, and whom none is left for runs one token that trains nothing."""
        layout = self.layout
        found = []
        for batch in batches:
            if layout.ep > 1:
                items = [Item(0, row, int(tokens)) for row, tokens in enumerate(batch.lengths)]
                mine = [item.sample for item in owners(items, layout.ep)[layout.ep_rank]]
                batch = batch.select(mine) if mine else batch
                if not mine or not any(batch.lengths > 1):
                    found.append(batches_.blank(self.device))
                    continue
            found.append(batches_.make(batch, self.device, layout.cp, layout.cp_rank))
        return found

    def train(self, batches: Sequence[Batch], sums: Sums, pinned: Parameters | None, reference: Parameters | None) -> None:
        """Add the micro-batches' gradients and figures. Old log-probs come with the tokens, or from `pinned` weights."""
        old = [b.given for b in batches]
        if pinned is not None:  # tokens that came without log-probs have ratio one
            found = self.logprobs(pinned, batches)
            old = [None if b.given is None else logprobs for b, logprobs in zip(batches, found)]
        other: list[torch.Tensor | None] = [None] * len(batches)
        if reference is not None and self.settings.kl_coefficient:
            other = self.logprobs(reference, batches)
        work = list(zip(batches, old, other))

        def forward(source: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
            batch, before, apart = next(source)
            return self._hidden(model, batch), partial(self._loss, batch, before, apart, sums)

        with self._ddp.no_sync():
            self._run(forward, work, forward_only=False)

    def logprobs(self, weights: Parameters, batches: Sequence[Batch]) -> list[torch.Tensor | None]:
        """Of each batch's trained tokens, [N] float32, at the rollout temperature; None but on the last stage."""

        def model(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self.model, dict(weights), args, kwargs)

        def told(batch: Batch, hidden: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
            return self._logprobs(hidden.squeeze(1), weights[self.model.output_weight_name], batch)[0]

        def forward(source: Iterator[Batch], _: Any) -> tuple[torch.Tensor, Any]:
            batch = next(source)
            return self._hidden(model, batch), partial(told, batch)

        with torch.no_grad():
            found = self._run(forward, batches, forward_only=True)
        return list(found) if self.layout.last else [None] * len(batches)

    def whole_logprobs(self, weights: Parameters, sequences: Sequences) -> NDArray[np.float32]:
        """[T] over all tokens of the Sequences, 0 where `loss_mask` is 0; the same on all ranks of the domain."""
        out = np.zeros(sequences.tokens, np.float32)
        if not sequences.trained_tokens:
            return out
        layout = self.layout
        if layout.ep > 1:  # everybody runs all of it: the trajectories need not be brought together again
            batch = batches_.make(sequences, self.device)
        else:
            (batch,) = self.shares([sequences])
        (mine,) = self.logprobs(weights, [batch])
        if mine is not None:
            out[batch.trained] = mine.cpu().numpy()
        whole = torch.from_numpy(out).to(self.device)
        if layout.cp > 1 and layout.last:
            dist.all_reduce(whole, group=mpu.get_context_parallel_group())
        if layout.pp > 1:
            dist.broadcast(whole, mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group())
        found: NDArray[np.float32] = whole.cpu().numpy()
        return found

    def _run(self, forward: Any, work: Sequence[Any], forward_only: bool) -> Any:
        return self._forward_backward(
            forward_step_func=forward,
            data_iterator=iter(work),
            model=[self._ddp],
            num_microbatches=len(work),
            seq_length=1,  # stages tell each other the true one
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _hidden(self, model: Any, batch: Batch) -> torch.Tensor:
        layout = self.layout
        packed = attention.pack(batch.lengths, self.device, self._attention, layout.cp, layout.cp_rank)
        hidden: torch.Tensor = model(batch.input_ids, batch.positions, None, packed_seq_params=packed)
        return hidden

    def _logprobs(self, hidden: torch.Tensor, weight: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden.index_select(0, batch.hidden)
        chunk = self.config.training.logprob_chunk_tokens
        return loss.token_logprobs(rows, weight, batch.targets, self.config.rollout.temperature, chunk, self._vocabulary)

    def _loss(
        self,
        batch: Batch,
        old: torch.Tensor | None,
        reference: torch.Tensor | None,
        sums: Sums,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """As megatron's schedule wants it: the loss (a sum), its count (ours is told at the step's end), nothing to report."""
        settings, count = self.settings, torch.tensor(len(batch.trained), dtype=torch.int)
        hidden = hidden.squeeze(1)
        if not len(batch.trained):
            return hidden.sum() * 0.0, count, {}
        current, entropy = self._logprobs(hidden, self.model.output_weight, batch)
        now = current.detach()
        against = old
        if settings.objective == "gspo" and old is not None:
            against = loss.sequence_ratio(current, old, batch.owner, batch.sequences)
        objective = loss.cispo_loss if settings.objective == "cispo" else loss.policy_loss
        values, clipped = objective(current, against, batch.advantages, settings.clip_low, settings.clip_high)
        if settings.importance_cap is not None and old is not None and batch.given is not None:
            values = values * loss.truncated_importance(old, batch.given, settings.importance_cap)
        if reference is not None:
            divergence = loss.divergence(settings.kl_estimator, current, reference)
            values = values + settings.kl_coefficient * divergence
            sums.kl += float(divergence.detach().sum())
        weights = loss.token_weights(batch.share, settings.aggregation, self.config.rollout.max_new_tokens)
        total = (values * weights).sum()
        gap = torch.zeros_like(now) if batch.given is None else (batch.given - now).abs()
        told = torch.stack([total.detach(), entropy.sum(), clipped.sum(), gap.sum(), gap.max()]).tolist()
        sums.loss += told[0]
        sums.entropy += told[1]
        sums.clipped += told[2]
        sums.gap += told[3]
        sums.gap_max = max(sums.gap_max, told[4])
        return total, count, {}

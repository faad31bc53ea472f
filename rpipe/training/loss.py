"""What is minimized, and what is told about it?

Log-probs of the trained tokens from their hidden states, in chunks and over a vocabulary cut across tensor-parallel
ranks; the policy objectives; estimates of the KL divergence. Every result is a sum or a vector over
tokens: nothing here knows the step's denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

Aggregation = Literal["token_mean", "sequence_mean", "fixed"]
Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Rows [start, start + rows) of the output weight are this rank's; what lies behind is padding.

    `group` is the tensor-parallel group, None where the vocabulary is whole.
    """

    start: int
    rows: int
    group: Any = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    chunk: int,
    vocabulary: VocabularyShard,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(hidden @ weight.T / temperature)[target] and the entropy (no gradient), both [N] float32.

    hidden [N, h] and weight [V / tp, h] in one dtype, targets [N] int64. At most `chunk` tokens' logits exist at a
    time, in backward too, where they are computed again.
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk, vocabulary)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        chunk: int,
        vocab: VocabularyShard,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy, log_totals = (torch.empty(len(targets), dtype=torch.float32, device=hidden.device) for _ in range(3))
        rows = weight[: vocab.rows]
        for at in _chunks(len(targets), chunk):
            logits = (hidden[at] @ rows.t()).float().div_(temperature)
            local, mine = _local(targets[at], vocab)
            highest = vocab.maximum(logits.amax(-1))
            target = (logits.gather(1, local).squeeze(1) - highest) * mine
            logits.sub_(highest[:, None])
            weights = logits.exp()
            total, mean, target = vocab.sum(torch.stack([weights.sum(-1), (weights * logits).sum(-1), target]))
            log_total = total.log()
            logprobs[at] = target - log_total
            entropy[at] = log_total - mean / total
            log_totals[at] = log_total + highest
        ctx.save_for_backward(hidden, weight, targets, log_totals)
        ctx.constants = (temperature, chunk, vocab)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, weight, targets, log_totals = ctx.saved_tensors
        temperature, chunk, vocab = ctx.constants
        rows = weight[: vocab.rows]
        grad_hidden = torch.empty_like(hidden)
        grad_rows = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        grad = grad / temperature
        for at in _chunks(len(targets), chunk):
            logits = (hidden[at] @ rows.t()).float().div_(temperature)
            local, mine = _local(targets[at], vocab)
            d = logits.sub_(log_totals[at, None]).exp_().mul_(-grad[at, None])  # -softmax ...
            d.scatter_add_(1, local, (grad[at] * mine)[:, None])  # ... + one at the target
            d = d.to(rows.dtype)
            grad_hidden[at] = d @ rows
            grad_rows[: vocab.rows] += d.t() @ hidden[at]
        return vocab.sum(grad_hidden), grad_rows.to(weight.dtype), None, None, None, None


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _local(targets: torch.Tensor, vocab: VocabularyShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets as rows of this shard, [n, 1], and whether they are its own, [n] (0 or 1)."""
    local = targets - vocab.start
    mine = (local >= 0) & (local < vocab.rows)
    return local.clamp(0, vocab.rows - 1)[:, None], mine.float()


def token_weights(share: torch.Tensor, aggregation: Aggregation, max_new_tokens: int) -> torch.Tensor:
    """What each trained token counts for, [N] float32; `share` is how many trained tokens its sequence has. To be divided
    by `denominator`.

    token_mean: 1. sequence_mean: 1 / its sequence's trained tokens. fixed (Dr.GRPO): 1 / max_new_tokens, so that a
    long answer weighs no less per token than a short one.
    """
    if aggregation == "sequence_mean":
        return 1.0 / share
    return torch.full(share.shape, 1.0 / max_new_tokens if aggregation == "fixed" else 1.0, device=share.device)


def denominator(aggregation: Aggregation, trained_tokens: int, sequences: int) -> int:
    """What this many tokens and sequences add to the step's divisor."""
    return trained_tokens if aggregation == "token_mean" else sequences


def policy_loss(
    current: torch.Tensor, old: torch.Tensor | None, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss per token and whether the clip took its gradient away (0 or 1), both [N].

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(current - old). Without `old` the ratio is one: the
    weighted negative log-likelihood, which has the same gradient and a value that says something.
    """
    if old is None:
        return -advantages * current, torch.zeros_like(current)
    ratio = (current - old).exp()
    clamped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped = (clamped * advantages < ratio * advantages).float()
    return -torch.minimum(ratio * advantages, clamped * advantages), clipped


def sequence_ratio(current: torch.Tensor, old: torch.Tensor, owner: torch.Tensor, sequences: int) -> torch.Tensor:
    """GSPO (arXiv 2507.18071): old log-probs under which each token's ratio is its sequence's, the geometric mean of the
    tokens' ratios, [N]; a token's gradient stays its own (their GSPO-token, equal to GSPO where a sequence has one advantage).
    """
    difference = (current - old).detach()
    total = torch.zeros(sequences, device=current.device).index_add_(0, owner, difference)
    mean = total / torch.bincount(owner, minlength=sequences).clamp(min=1)
    return current.detach() - mean[owner]


def cispo_loss(
    current: torch.Tensor, old: torch.Tensor | None, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO (arXiv 2506.13585): the ratio is a clipped constant weight, so that no token loses its gradient. As `policy_loss`;
    the second result says where the weight was clipped."""
    if old is None:
        return -advantages * current, torch.zeros_like(current)
    ratio = (current - old).exp().detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * current, (weight != ratio).float()


def truncated_importance(recomputed: torch.Tensor, engine: torch.Tensor, cap: float) -> torch.Tensor:
    """min(p_trainer / p_engine, cap) of tokens that the engine sampled, both under the round-start weights, [N]: corrects for
    the two computing the same weights differently."""
    return (recomputed - engine).exp().clamp(max=cap)


def divergence(estimator: Estimator, current: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(current, reference) a token, [N], with d = reference - current (Schulman, "Approximating KL
    divergence"). k1: -d, unbiased, noisy; as a loss its expected gradient is zero. k2: d^2 / 2, biased, its gradient is
    the divergence's. k3: exp(d) - d - 1, unbiased and never negative."""
    d = reference - current
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d * d / 2
    return d.exp() - d - 1.0

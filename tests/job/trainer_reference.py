"""What would transformers and torch.optim do? Small models, uneven batches, and one step in plain torch.

Nothing here is packed, chunked, cut or streamed: one sequence at a time, full float32 softmax.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rpipe.config import Config, Loss
from rpipe.core.types import Sequences

VOCABULARY = 131  # odd: under tp 2 one row is padding
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "use_cache": False,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_model(folder: Path, architecture: str, tied: bool, seed: int = 0, shard: str = "5GB", stretched: bool = False) -> Path:
    """A random model on disk, norms and biases away from their initial ones and zeros so that a mix-up shows."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    config, model = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[architecture]
    extra: dict[str, Any] = {"head_dim": 32} if architecture.startswith("qwen3") else {}
    if architecture == "qwen3_moe":
        extra.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=bool(seed % 2))
    if stretched:
        extra["rope_parameters"] = STRETCHED
    torch.manual_seed(seed)
    made = model(config(**COMMON, **extra, tie_word_embeddings=tied)).float()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "norm" in name or "bias" in name:
                p.add_(0.2 * torch.randn_like(p))
            else:
                p.mul_(3)
    made.save_pretrained(folder, max_shard_size=shard)
    return folder


def settings(folder: Path, ranks: int = 1, tp: int = 1, loss: Any = None, cut: Any = None, **optimizer: Any) -> Config:
    # a large epsilon: Adam turns rounding of gradients near zero into whole steps otherwise
    optimizer = {"learning_rate": 1e-3, "epsilon": 1e-5, "weight_decay": 0.1, "clip_grad_norm": 0.5, **optimizer}
    return Config.model_validate(
        {
            "run": {"iterations": 3},
            "model": {"path": str(folder)},
            "data": {"train": {"kind": "sums"}},
            "cluster": {"training_ranks": ranks},
            "rollout": {"temperature": 0.8, "max_new_tokens": 40},
            "training": {"tp": tp, **(cut or {}), "logprob_chunk_tokens": 17, "loss": loss or {}, "optimizer": optimizer},
        }
    )


def sequences(n: int, seed: int, given: bool = True) -> Sequences:
    """Lengths 3 to 60, advantages of both signs, given log-probs far enough from the model's that some ratios are clipped."""
    r = np.random.default_rng(seed)
    prompts = r.integers(1, 20, n).astype(np.int32)
    answers = r.integers(2, 40, n).astype(np.int32)
    mask = np.concatenate([np.r_[np.zeros(p), r.random(a) < 0.9] for p, a in zip(prompts, answers)]).astype(np.uint8)
    tokens = int((prompts + answers).sum())
    return Sequences(
        lengths=prompts + answers,
        prompt_lengths=prompts,
        token_ids=r.integers(0, VOCABULARY, tokens).astype(np.int32),
        loss_mask=mask,
        advantages=r.standard_normal(n).astype(np.float32),
        rewards=np.zeros(n, np.float32),
        logprobs=(-5 + 0.5 * r.standard_normal(tokens)).astype(np.float32) * mask if given else None,
    )


def near(model: Any, batch: Sequences, temperature: float, spread: float, seed: int = 0) -> Sequences:
    """The batch with given log-probs around the model's own, as a rollout would send them."""
    noise = np.random.default_rng(seed).standard_normal(batch.tokens).astype(np.float32) * spread
    with torch.no_grad():
        now = np.concatenate([logprobs(model, batch, i, temperature)[0].numpy() for i in range(batch.count)])
    from dataclasses import replace

    return replace(batch, logprobs=(now + noise) * batch.loss_mask)


def logprobs(model: Any, batch: Sequences, i: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every token of sequence i (0 for the first), and the entropy before it."""
    start = int(batch.lengths[:i].sum())
    ids = torch.from_numpy(batch.token_ids[start : start + batch.lengths[i]].astype(np.int64))
    every = torch.log_softmax(model(ids[None, :-1]).logits[0].float() / temperature, -1)
    zero = torch.zeros(1)
    entropy = -(every.exp() * every).sum(-1).detach()
    return torch.cat([zero, every.gather(1, ids[1:, None])[:, 0]]), torch.cat([zero, entropy])


def objective(
    model: Any, batch: Sequences, loss: Loss, config: Config, reference: Any = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """The step's loss, divided, and what StepStats says of it."""
    total, tokens = torch.zeros(()), float(batch.loss_mask.sum())
    told = {"entropy": 0.0, "clip_fraction": 0.0, "kl": 0.0, "logprob_gap_mean": 0.0, "logprob_gap_max": 0.0}
    for i in range(batch.count):
        at = slice(int(batch.lengths[:i].sum()), int(batch.lengths[: i + 1].sum()))
        mask = torch.from_numpy(batch.loss_mask[at].astype(bool))
        now, entropy = (x[mask] for x in logprobs(model, batch, i, config.rollout.temperature))
        old = now.detach() if batch.logprobs is None else torch.from_numpy(batch.logprobs[at])[mask]
        a, ratio = float(batch.advantages[i]), (now - old).exp()
        kept = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        each = -torch.minimum(ratio * a, kept * a)
        if reference is not None:
            with torch.no_grad():
                d = logprobs(reference, batch, i, config.rollout.temperature)[0][mask]
            divergence = (d - now).exp() - (d - now) - 1
            each = each + loss.kl_coefficient * divergence
            told["kl"] += float(divergence.detach().sum())
        told["entropy"] += float(entropy.sum())
        told["clip_fraction"] += float(((ratio - kept) * a > 0).sum())
        if batch.logprobs is not None:
            told["logprob_gap_mean"] += float((now - old).abs().sum())
            told["logprob_gap_max"] = max(told["logprob_gap_max"], float((now - old).abs().max()))
        by = {"token_mean": 1.0, "sequence_mean": max(int(mask.sum()), 1), "fixed": config.rollout.max_new_tokens}[
            loss.aggregation
        ]
        total = total + each.sum() / by
    total = total / (tokens if loss.aggregation == "token_mean" else batch.count)
    told = {k: v if k.endswith("max") else v / tokens for k, v in told.items()}
    return total, {**told, "loss": float(total.detach())}


def adamw(model: Any, config: Config) -> torch.optim.AdamW:
    o = config.training.optimizer
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.epsilon)

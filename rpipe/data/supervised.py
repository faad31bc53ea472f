"""What does the warm-up learn from? Prompts' own worked solutions, as batches that never end early."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from rpipe.core.types import Prompt, Sequences
from rpipe.data.entry import DataError
from rpipe.data.order import Order


def supervised(prompts: Iterable[Prompt], tokenizer: Any, eos_id: int) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, target ids with the end of sequence) of each prompt. Raises DataError where one has no solution."""
    prompts = list(prompts)
    solutions = [p.metadata.get("solution") for p in prompts]
    for prompt, text in zip(prompts, solutions):
        if not isinstance(text, str) or not text:
            raise DataError(
                f'{prompt.prompt_id}: model.warm_up wants a "solution" (text) with every training prompt;'
                " or switch it off: model.warm_up=null"
            )
    targets = tokenizer(solutions, add_special_tokens=False)["input_ids"] if prompts else []
    return [(list(p.token_ids), [*ids, eos_id]) for p, ids in zip(prompts, targets)]


def supervised_batches(
    prompts: Iterable[Prompt], tokenizer: Any, eos_id: int, sequences_per_step: int, steps: int, seed: int
) -> Iterator[Sequences]:
    """`steps` batches in a seeded order; the loss is on the solution and the end of sequence, advantages are 1."""
    pairs = supervised(prompts, tokenizer, eos_id)
    order, cursor = Order(len(pairs), seed), 0
    for _ in range(steps):
        indices, cursor = order.take(cursor, sequences_per_step)
        yield _batch([pairs[i] for i in indices])


def _batch(pairs: list[tuple[list[int], list[int]]]) -> Sequences:
    n = len(pairs)
    return Sequences(
        lengths=np.array([len(p) + len(t) for p, t in pairs], np.int32),
        prompt_lengths=np.array([len(p) for p, _ in pairs], np.int32),
        token_ids=np.array([i for p, t in pairs for i in (*p, *t)], np.int32),
        loss_mask=np.array([m for p, t in pairs for m in (*[0] * len(p), *[1] * len(t))], np.uint8),
        advantages=np.ones(n, np.float32),
        rewards=np.zeros(n, np.float32),
        logprobs=None,
    )

"""What does the model see of a micro-batch?

`Sequences` (numpy, as they travel) become tensors: inputs, and for each trained token the hidden state that predicts it.
A sequence's last token predicts nothing and is not fed; a token that is not trained gets no logits. Under context
parallelism a rank is fed its chunks of every sequence and trains the tokens that they predict.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rpipe.core.types import Sequences
from rpipe.training.attention import chunks


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """T inputs of the sequences of two tokens or more, N trained tokens, n sequences."""

    input_ids: torch.Tensor  # [1, T] int64
    positions: torch.Tensor  # [1, T] int64, from 0 in each sequence
    lengths: list[int]  # of the fed sequences; sums to T where context is not cut
    hidden: torch.Tensor  # [N] int64, which of the T hidden states predicts trained token i
    targets: torch.Tensor  # [N] int64
    owner: torch.Tensor  # [N] int64, the sequence of trained token i
    share: torch.Tensor  # [N] float32, how many trained tokens that sequence has, on all ranks
    advantages: torch.Tensor  # [N] float32, its sequence's
    given: torch.Tensor | None  # [N] float32, log-probs that came with the tokens
    trained: NDArray[np.int64]  # [N], where the trained tokens stand in the Sequences
    sequences: int


def make(sequences: Sequences, device: torch.device, cp: int = 1, cp_rank: int = 0) -> Batch:
    """Raises ValueError where a sequence's first token is to be trained: nothing predicts it."""
    lengths = sequences.lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    tokens = int(ends[-1]) if len(ends) else 0
    owner = np.repeat(np.arange(len(lengths)), lengths)
    trained = np.flatnonzero(sequences.loss_mask)
    if np.isin(trained, starts).any():
        row = int(owner[trained[np.isin(trained, starts)][0]])
        raise ValueError(f"sequence {row} of the micro-batch trains its first token, which nothing predicts")
    counts = np.bincount(owner[trained], minlength=len(lengths))
    positions, fed = _fed(lengths, starts, cp, cp_rank)
    place = np.full(tokens, -1)  # of a token among this rank's inputs
    place[fed[fed >= 0]] = np.flatnonzero(fed >= 0)
    trained = trained[place[trained - 1] >= 0]
    ids = np.where(fed >= 0, sequences.token_ids[fed], 0)

    def send(x: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    return Batch(
        input_ids=send(ids.astype(np.int64))[None],
        positions=send(positions)[None],
        lengths=[int(n) - 1 for n in lengths if n > 1],
        hidden=send(place[trained - 1]),
        targets=send(sequences.token_ids[trained].astype(np.int64)),
        owner=send(owner[trained]),
        share=send(counts[owner[trained]].astype(np.float32)),
        advantages=send(sequences.advantages.astype(np.float32)[owner[trained]]),
        given=None if sequences.logprobs is None else send(sequences.logprobs[trained].astype(np.float32)),
        trained=trained,
        sequences=sequences.count,
    )


def _fed(
    lengths: NDArray[np.int64], starts: NDArray[np.int64], cp: int, rank: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """This rank's inputs, both [T]: positions in their sequences, and places in the Sequences (-1: padding)."""
    positions = [chunks(int(n) - 1, cp, rank) for n in lengths if n > 1]
    if not positions:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    whole = [(start, n - 1) for start, n in zip(starts, lengths) if n > 1]
    fed = [np.where(at < n, start + at, -1) for at, (start, n) in zip(positions, whole)]
    return np.concatenate(positions), np.concatenate(fed)


def blank(device: torch.device) -> Batch:
    """One token that trains nothing: what a rank runs that has to keep step with peers which have work."""
    one = Sequences(
        lengths=np.array([2], np.int32),
        prompt_lengths=np.array([2], np.int32),
        token_ids=np.zeros(2, np.int32),
        loss_mask=np.zeros(2, np.uint8),
        advantages=np.zeros(1, np.float32),
        rewards=np.zeros(1, np.float32),
        logprobs=np.zeros(2, np.float32),
    )
    return make(one, device)

"""What does the model see of a micro-batch?

`Sequences` (numpy, as they travel) become tensors: inputs, and for each trained token the hidden state that predicts it.
A sequence's last token predicts nothing and is not fed; a token that is not trained gets no logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rpipe.core.types import Sequences


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """T inputs of the sequences of two tokens or more, N trained tokens, n sequences."""

    input_ids: torch.Tensor  # [1, T] int64
    positions: torch.Tensor  # [1, T] int64, from 0 in each sequence
    lengths: list[int]  # of the fed sequences, sums to T
    hidden: torch.Tensor  # [N] int64, which of the T hidden states predicts trained token i
    targets: torch.Tensor  # [N] int64
    owner: torch.Tensor  # [N] int64, the sequence of trained token i
    advantages: torch.Tensor  # [N] float32, its sequence's
    given: torch.Tensor | None  # [N] float32, log-probs that came with the tokens
    trained: NDArray[np.int64]  # [N], where the trained tokens stand in the Sequences
    sequences: int


def make(sequences: Sequences, device: torch.device) -> Batch:
    """Raises ValueError where a sequence's first token is to be trained: nothing predicts it."""
    lengths = sequences.lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    tokens = int(ends[-1]) if len(ends) else 0
    owner = np.repeat(np.arange(len(lengths)), lengths)
    fed = np.ones(tokens, bool)
    fed[ends[lengths > 0] - 1] = False
    trained = np.flatnonzero(sequences.loss_mask)
    if np.isin(trained, starts).any():
        row = int(owner[trained[np.isin(trained, starts)][0]])
        raise ValueError(f"sequence {row} of the micro-batch trains its first token, which nothing predicts")
    position = np.arange(tokens) - np.repeat(starts, lengths)
    place = np.cumsum(fed) - 1  # of a fed token among the inputs

    def send(x: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    return Batch(
        input_ids=send(sequences.token_ids[fed].astype(np.int64))[None],
        positions=send(position[fed])[None],
        lengths=[int(n) - 1 for n in lengths if n > 1],
        hidden=send(place[trained - 1]),
        targets=send(sequences.token_ids[trained].astype(np.int64)),
        owner=send(owner[trained]),
        advantages=send(sequences.advantages.astype(np.float32)[owner[trained]]),
        given=None if sequences.logprobs is None else send(sequences.logprobs[trained].astype(np.float32)),
        trained=trained,
        sequences=sequences.count,
    )

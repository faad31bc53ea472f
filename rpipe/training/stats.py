"""What does a step tell about itself?

Sums on each rank while micro-batches run, one exchange at the step's end, one `StepStats` with the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rpipe.training.trainer import StepStats


@dataclass(slots=True)
class Sums:
    """What a step's micro-batches add up to on one rank; `gap_max` alone is a maximum."""

    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    gap: float = 0.0
    trained_tokens: float = 0.0
    sequences: float = 0.0
    denominator: float = 0.0
    gap_max: float = 0.0

    def over_ranks(self, speaking: Sequence[int], device: torch.device) -> Sums:
        """The whole step's, equal on all ranks of the default world: those of the `speaking` ranks, added in their order."""
        mine = torch.tensor([getattr(self, name) for name in self.__dataclass_fields__], dtype=torch.float64, device=device)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        columns = list(zip(*(rows[rank].tolist() for rank in speaking)))
        total = Sums(*map(sum, columns))
        total.gap_max = max(columns[-1])
        return total

    def told(self, applied: bool, grad_norm: float, learning_rate: float) -> StepStats:
        tokens = max(self.trained_tokens, 1.0)
        return StepStats(
            skipped=not applied,
            loss=self.loss / max(self.denominator, 1.0),
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            entropy=self.entropy / tokens,
            clip_fraction=self.clipped / tokens,
            kl=self.kl / tokens,
            logprob_gap_mean=self.gap / tokens,
            logprob_gap_max=self.gap_max,
            trained_tokens=int(self.trained_tokens),
            sequences=int(self.sequences),
        )

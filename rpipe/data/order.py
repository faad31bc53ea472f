"""In which order are prompts drawn, for ever?

Epoch after epoch, each a fresh permutation (or the file's order). A cursor is the count of prompts drawn since the run's
start: it alone resumes the order. Keys come from Philox's raw 64-bit stream, which numpy promises never to change, and a
stable sort makes them a permutation; `Generator.permutation` carries no such promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Order:
    """Indices 0 .. size - 1, epoch-wise. Raises ValueError where size < 1."""

    size: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"an order of {self.size} prompts; wanted: at least 1")

    def take(self, cursor: int, n: int) -> tuple[list[int], int]:
        """The n indices from `cursor` on (prompts drawn so far), and the cursor after them."""
        if cursor < 0 or n < 0:
            raise ValueError(f"cursor {cursor}, n {n}; wanted: neither negative")
        taken: list[int] = []
        at = cursor
        while len(taken) < n:
            epoch, offset = divmod(at, self.size)
            part = self._epoch(epoch)[offset : offset + n - len(taken)]
            taken.extend(part.tolist())
            at += len(part)
        return taken, at

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.size)
        return _permutation(self.size, self.seed, epoch)


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    raw = np.random.Philox(np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, epoch])).random_raw(size)
    return np.argsort(raw, kind="stable")

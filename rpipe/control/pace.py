"""How much later does a token come in a larger batch, and how unlike are groups? Together they say what a frontier's width
would do (`policy/width.py`).

A token's seconds are fitted as a line over the trajectories that its engine ran, from finished turns: their mean seconds a
token after the first, and the mean of what ran beside them when they began and when they ended.
"""

from __future__ import annotations

from collections import deque

from rpipe.policy.width import Width, widths

GROUPS = 64  # whose longest responses are remembered
FORGET = 0.5  # of the turns, at each rollout


class Pace:
    def __init__(self, engines: int, slots_per_engine: int) -> None:
        self._engines, self._slots = engines, slots_per_engine
        self._longest_tokens: deque[int] = deque(maxlen=GROUPS)
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # of turns: batch x, seconds a token y

    def turn(self, tokens: int, seconds: float, began_beside: int, ended_beside: int) -> None:
        """`seconds` for the `tokens` after the first; `beside`: trajectories on its engine, itself counted, queue included."""
        if tokens < 1:
            return
        batch, pace_s = (min(began_beside, self._slots) + min(ended_beside, self._slots)) / 2, seconds / tokens
        # a short turn's mean says less
        self._n += tokens
        self._x += tokens * batch
        self._y += tokens * pace_s
        self._xx += tokens * batch * batch
        self._xy += tokens * batch * pace_s

    def group(self, longest_tokens: int) -> None:
        self._longest_tokens.append(longest_tokens)

    def forget(self) -> None:
        self._n, self._x, self._y, self._xx, self._xy = (
            (1 - FORGET) * value for value in (self._n, self._x, self._y, self._xx, self._xy)
        )

    def token_s(self, batch: float) -> float:
        """Seconds a token where an engine runs `batch` trajectories. A larger batch is never faster, and never makes fewer
        tokens a second, whatever noise says."""
        x, y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - x * x
        slope = min(max(0.0, (self._xy / self._n - x * y) / spread), y / x) if spread > 1e-9 else 0.0
        return y + slope * (min(max(batch, 1.0), self._slots) - x)

    def widths(self, trajectories_per_group: int) -> tuple[Width, ...]:
        """Empty: nothing is known yet."""
        if self._y <= 0 or not self._longest_tokens:
            return ()
        on_one_engine = trajectories_per_group / self._engines
        return widths(self._longest_tokens, self.token_s, max(1, int(self._slots / on_one_engine)), on_one_engine)

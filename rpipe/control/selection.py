"""Which of an iteration's groups are trained, and are more prompts needed?

The first R groups, in submission order, that the filter keeps. Speed decides nothing: a group that is done early does not push
out one of lower order that still runs, or short answers would be favoured. A group is *selected* as soon as fewer than R groups
before it can still be kept; until then a finished one is held. Dropping a group selects the next one; where none is drawn
yet, more are asked for, up to a limit (DAPO's dynamic sampling, bounded). One that is dropped before its turn came counts
only when it comes: in another run the others might have been done first, and it would never have been looked at.

Invariants (tests/property/test_selection.py asserts them):
- never more than R are selected, and exactly R where enough of those drawn are kept;
- what is selected in the end, and how many are drawn, depends on the filter's answers alone, not on their order in time
  (the next iteration's prompts begin where this one's end);
- never more are drawn than the limit.
"""

from __future__ import annotations


class Selection:
    """Orders are submission orders, from 0. `ahead`: groups in the air beyond those needed (over-sampling)."""

    def __init__(self, wanted: int, ahead: int = 0, refill: int = 0) -> None:
        self.wanted = wanted  # R
        self.ahead = ahead
        self.most = wanted + ahead + refill  # groups that may be drawn in all
        self.drawn = 0
        self.selected = 0  # may still be trained: not refused, with fewer than R before them
        self.end = 0  # every order below it is selected or refused
        self._asked = wanted + ahead
        self._refused: set[int] = set()

    def drew(self, count: int) -> None:
        """The next `count` orders exist; `needs` tells which of them are selected at once."""
        self.drawn += count
        self._extend()

    def needs(self, order: int) -> bool:
        return order < self.end and order not in self._refused

    def refuse(self, order: int) -> list[int]:
        """The filter dropped it; returns the orders that are selected in its place."""
        assert order < self.drawn and order not in self._refused, f"order {order} refused twice"
        self._refused.add(order)
        if order < self.end:
            self.selected -= 1
        return self._extend()

    def ask(self) -> int:
        """How many more to draw now. They count as asked for from here on."""
        refused = self.end - self.selected  # of those whose turn came
        count = max(0, min(self.wanted + self.ahead + refused, self.most) - self._asked)
        self._asked += count
        return count

    @property
    def awaits_draw(self) -> bool:
        return self._asked > self.drawn

    @property
    def final(self) -> bool:
        """Nothing that is drawn later can be selected."""
        return self.selected == self.wanted or (self.drawn == self._asked == self.most)

    def _extend(self) -> list[int]:
        found: list[int] = []
        while self.selected < self.wanted and self.end < self.drawn:
            if self.end not in self._refused:
                self.selected += 1
                found.append(self.end)
            self.end += 1
        return found

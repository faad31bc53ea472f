"""Which engines take requests, which come back, and which take part in the next publish?

    standing  -> updating    weights are offered
    updating  -> serving     it holds them
    any       -> lost        it died or fell silent; a restart is commanded
    lost      -> serving     it is back with the weights that count now
    lost      -> standing    it is back with older ones: the next publish reaches it

Trajectories are placed on serving engines only.
"""

from __future__ import annotations

OUT_OF_SERVICE = 1 << 40  # as a count of trajectories in flight: no placement prefers it


class Engines:
    """Where each engine stands; a loss is forgotten once the engine took part in a publish."""

    def __init__(self, count: int) -> None:
        self.standing = set(range(count))
        self.updating: set[int] = set()
        self.serving: set[int] = set()
        self._losses = [0] * count  # in a row

    def offered(self) -> list[int]:
        """Who takes part in this publish."""
        self.updating = self.standing | self.serving
        self.standing, self.serving = set(), set()
        return sorted(self.updating)

    def updated(self, engine: int) -> None:
        self.updating.remove(engine)
        self.serving.add(engine)
        self._losses[engine] = 0

    def lose(self, engine: int) -> int:
        """How many times in a row it was lost by now."""
        for place in (self.standing, self.updating, self.serving):
            place.discard(engine)
        self._losses[engine] += 1
        return self._losses[engine]

    def back(self, engine: int, current: bool) -> None:
        """It stands again; `current`: with the weights that the others hold."""
        (self.serving if current else self.standing).add(engine)

    def outdated(self) -> list[int]:
        """Engines that stand with older weights while nobody serves: nothing goes on until one of them is started again."""
        if self.serving or self.updating:
            return []
        stale, self.standing = sorted(self.standing), set()
        return stale

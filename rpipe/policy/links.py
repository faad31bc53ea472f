"""Which link between the nodes, or which node, is slower than the rest?

Judged against the upper quartile of all links measured: no data sheet is needed, and a bad node of three, which spoils two of
the three links, still shows. With two nodes there is nothing to compare with; the figures are told all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

SLOW = 0.5  # of the upper quartile


@dataclass(frozen=True, slots=True)
class Link:
    a: str
    b: str
    bytes_per_s: float  # of the slower direction

    @property
    def name(self) -> str:
        return f"{self.a} - {self.b}"


@dataclass(frozen=True, slots=True)
class Verdict:
    median_bytes_per_s: float
    slow_nodes: tuple[str, ...]  # most of whose links are slow
    slow_links: tuple[Link, ...]  # between other nodes


def judge(links: Sequence[Link]) -> Verdict:
    """`links`: every pair once."""
    ordered = sorted(link.bytes_per_s for link in links)
    slow = [link for link in links if link.bytes_per_s < SLOW * ordered[ceil(0.75 * len(ordered)) - 1]]
    nodes = list(dict.fromkeys(name for link in links for name in (link.a, link.b)))
    count = {name: sum(name in (link.a, link.b) for link in slow) for name in nodes}
    bad = tuple(name for name in nodes if len(nodes) > 2 and count[name] > (len(nodes) - 1) / 2)
    return Verdict(median(ordered), bad, tuple(link for link in slow if link.a not in bad and link.b not in bad))


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Every pair of nodes once, in rounds of pairs that share no node (the circle method): links are measured side by side."""
    ring = [*range(nodes), *([-1] if nodes % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found

"""How wide should a frontier be, and what does narrowness cost?

W groups side by side bring their first one when the shortest of their longest responses is done. The more groups, the shorter
it is (E[min of W]); the more trajectories run, the later each token comes. Narrow is soonest where lengths are alike and tokens
slow down with the batch, wide where tails are heavy and an accelerator decodes many sequences as fast as few. Until that first
group is there, rollout makes fewer tokens than it could: that is what narrowness costs.

Both are told from past turns (control/pace.py). Prefill is left out: it is the same for every width. What an environment
answers counts as generated, though no engine makes it: an agent's first group is expected too late, at every width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Width:
    groups: int
    first_s: float  # from a rollout's begin to its first group
    lost_s: float  # of rollout's time until then


def steps(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 ... `most`: a step of 1.5 at most, from 2 on."""
    return sorted({w for k in range(most.bit_length()) for w in (1 << k, 3 << k >> 1) if w <= most} | {most})


def widths(
    longest_tokens: Sequence[int], token_s: Callable[[float], float], most: int, group_slots: float
) -> tuple[Width, ...]:
    """Of each of `steps(most)` groups.

    `longest_tokens`: of past groups' longest responses. `token_s`: seconds a token, by the trajectories that an engine runs.
    `most`: groups that fill all engines. `group_slots`: trajectories of a group on one engine. O(log(most) x groups).
    """
    lengths, n = sorted(longest_tokens), len(longest_tokens)

    def least_tokens(width: int) -> float:
        return sum(tokens * (((n - i) / n) ** width - ((n - i - 1) / n) ** width) for i, tokens in enumerate(lengths))

    def tokens_a_second(width: int) -> float:
        return width * group_slots / token_s(width * group_slots)

    fastest = max(tokens_a_second(w) for w in steps(most))
    found = []
    for width in steps(most):
        first_s = least_tokens(width) * token_s(width * group_slots)
        found.append(Width(width, first_s, first_s * (1 - tokens_a_second(width) / fastest)))
    return tuple(found)

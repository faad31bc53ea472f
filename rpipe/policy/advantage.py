"""Advantage: how much better than its siblings was a trajectory?

GRPO: A_i = (r_i - mean) / (std + eps) over the K trajectories of one group (RolloutPipe, section 2; the sample standard
deviation). Dr.GRPO leaves the division out. RLOO compares with the mean of the *other* trajectories. A group whose rewards
are all equal has advantage 0 everywhere, whatever rounding says: a near-zero deviation would blow noise up.

REINFORCE++ (arXiv 2501.03262) whitens over all trajectories of a step: a group alone has only its rewards to tell, and
`whitened` is asked when the step's groups are all there. So it cannot stream.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import accumulate

EPSILON = 1e-6

Advantage = Callable[[Sequence[float]], tuple[float, ...]]


def grpo(rewards: Sequence[float]) -> tuple[float, ...]:
    centred = dr_grpo(rewards)
    if len(rewards) < 2:
        return centred
    deviation = math.sqrt(math.fsum(x * x for x in centred) / (len(rewards) - 1))
    if deviation < EPSILON:
        return (0.0,) * len(rewards)
    return tuple(x / (deviation + EPSILON) for x in centred)


def dr_grpo(rewards: Sequence[float]) -> tuple[float, ...]:
    mean = math.fsum(rewards) / len(rewards)
    return tuple(r - mean for r in rewards)


def rloo(rewards: Sequence[float]) -> tuple[float, ...]:
    """r_i - mean of the others = K / (K - 1) (r_i - mean); 0 for a trajectory without siblings."""
    k = len(rewards)
    return tuple(x * k / max(k - 1, 1) for x in dr_grpo(rewards))


def raw(rewards: Sequence[float]) -> tuple[float, ...]:
    """The rewards themselves: `whitened` follows."""
    return tuple(rewards)


def whitened(groups: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """(r - mean) / (std + eps) over all trajectories of all groups; zeros where they are all equal."""
    flat = grpo([r for group in groups for r in group])
    ends = list(accumulate(len(group) for group in groups))
    return [flat[end - len(group) : end] for end, group in zip(ends, groups)]


def zero_variance(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) < EPSILON


def shuffled(rewards: Sequence[float], key: int) -> tuple[float, ...]:
    """A control: the same rewards in an order fixed by `key` and unrelated to the trajectories."""
    order = sorted(range(len(rewards)), key=lambda i: hashlib.blake2b(b"%d:%d" % (key, i), digest_size=8).digest())
    return tuple(rewards[i] for i in order)


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce_pp": raw}

"""What are the nouns, and how does a trajectory travel?

Prompt -> Group -> Trajectory -> Turn, then `Sequences`: trajectories laid end to end, the one form in which tokens move
between processes. A group on the channel and a micro-batch at the trainer are both `Sequences`.

Ids: a training group is numbered over the whole run (iteration x groups that one may draw + submission order); evaluation
groups are negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

GroupId = int
Version = int  # of the weights; 0 is what the run started from


class TrajectoryId(NamedTuple):
    """One sampled response of one group."""

    group: GroupId
    sample: int  # 0 .. K-1

    def __str__(self) -> str:
        return f"{self.group}.{self.sample}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a data set, tokenized once."""

    prompt_id: str  # names its origin in messages: "train.jsonl:17", "sums[3]"
    token_ids: tuple[int, ...]
    text: str
    answer: str
    reward: str  # name of the reward function that scores it
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) of one trajectory were sampled under `version`. What lies in no span was not sampled: an
    environment's answer."""

    start: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished response: the turns and, between them, what the environment answered. Token ids and log-probs are the
    engine's own, never re-tokenized."""

    id: TrajectoryId
    prompt_ids: NDArray[np.int32]  # [P]
    output_ids: NDArray[np.int32]  # [N]
    logprobs: NDArray[np.float32]  # [N], log p(token) at the sampling temperature, no top-p renormalization; 0 of answers
    versions: tuple[VersionSpan, ...]  # in order, of the sampled tokens
    finish: str  # of the last turn: stop | length | deadline

    @property
    def sampled(self) -> NDArray[np.uint8]:
        """[N], 1 on tokens that the model sampled."""
        mask = np.zeros(len(self.output_ids), np.uint8)
        for span in self.versions:
            mask[span.start : span.end] = 1
        return mask

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """[start, end) of turn, answer, turn, ... ; the last is a turn, empty where it was cut before its first token."""
        edges = [0, 0]
        for span in self.versions:
            if span.start > edges[-1]:
                edges += [span.start, span.start]
            edges[-1] = span.end
        if edges[-1] < len(self.output_ids):
            edges += [len(self.output_ids)] * 2
        return list(pairwise(edges))


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """n trajectories laid end to end; T is the sum of `lengths`.

    `logprobs` is None where no engine sampled the tokens (supervised warm-up): the trainer then uses its own, so the
    ratio is one and the gradient is that of the weighted log-likelihood.
    """

    lengths: NDArray[np.int32]  # [n], prompt and response
    prompt_lengths: NDArray[np.int32]  # [n]
    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.uint8]  # [T], 1 on tokens whose log-prob is trained
    advantages: NDArray[np.float32]  # [n]
    rewards: NDArray[np.float32]  # [n]
    logprobs: NDArray[np.float32] | None  # [T], 0 outside the response

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (getattr(self, f.name) for f in fields(self)) if a is not None)

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], rewards: Sequence[float], advantages: Sequence[float]) -> Sequences:
        """Lay trajectories end to end; every sampled token is trained."""
        prompts = np.array([len(t.prompt_ids) for t in trajectories], np.int32)
        outputs = np.array([len(t.output_ids) for t in trajectories], np.int32)
        blank = [np.zeros(n, np.float32) for n in prompts]
        return cls(
            lengths=prompts + outputs,
            prompt_lengths=prompts,
            token_ids=np.concatenate([x for t in trajectories for x in (t.prompt_ids, t.output_ids)]).astype(np.int32),
            loss_mask=np.concatenate([x for p, t in zip(prompts, trajectories) for x in (np.zeros(p, np.uint8), t.sampled)]),
            advantages=np.array(advantages, np.float32),
            rewards=np.array(rewards, np.float32),
            logprobs=np.concatenate([x for b, t in zip(blank, trajectories) for x in (b, t.logprobs)]).astype(np.float32),
        )

    def select(self, indices: Sequence[int]) -> Sequences:
        """The chosen rows, in the given order."""
        ends = np.cumsum(self.lengths)
        at = [slice(int(ends[i] - self.lengths[i]), int(ends[i])) for i in indices]
        rows = np.array(indices, np.int64)
        return Sequences(
            lengths=self.lengths[rows],
            prompt_lengths=self.prompt_lengths[rows],
            token_ids=np.concatenate([self.token_ids[s] for s in at]),
            loss_mask=np.concatenate([self.loss_mask[s] for s in at]),
            advantages=self.advantages[rows],
            rewards=self.rewards[rows],
            logprobs=None if self.logprobs is None else np.concatenate([self.logprobs[s] for s in at]),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Sequences]) -> Sequences:
        """All rows of all parts. Raises ValueError where some parts have log-probs and some have none."""
        if len({p.logprobs is None for p in parts}) != 1:
            raise ValueError("sequences with and without log-probs do not share a micro-batch")
        joined = {f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls) if f.name != "logprobs"}
        has = parts[0].logprobs is not None
        return cls(**joined, logprobs=np.concatenate([p.logprobs for p in parts]) if has else None)

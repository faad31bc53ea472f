"""What does the rollout side hold: where prompts come from, and a group's payload until the trainer has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rpipe.core.events import GroupSpec
from rpipe.core.types import GroupId, Prompt, Sequences, Trajectory, TrajectoryId, VersionSpan
from rpipe.data.order import Order
from rpipe.data.prompts import PromptSet
from rpipe.rollout.kept import KeptGroup, KeptTrajectory
from rpipe.runtime.channel import pack
from rpipe.runtime.dump import TrajectoryDump


@dataclass(frozen=True, slots=True)
class RolloutData:
    """Prompts in their order, and the way between ids and text."""

    train: PromptSet
    held_out: list[Prompt]
    order: Order
    reward_functions: dict[str, str]  # name -> where it was asked for
    decode: Callable[[list[int]], str]
    encode: Callable[[str], list[int]]  # of what an environment answers
    notes: list[str]  # what a person should know of the prompts


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of one response, from one engine or from the environment. `spans`: (start, end, version), counted
    within the part; none where the environment spoke."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: tuple[tuple[int, int, int], ...]


class HeldGroup:
    """The payload of one group: its prompt and what came back so far."""

    def __init__(self, prompt: Prompt, count: int) -> None:
        self.prompt = prompt
        self.trajectories: list[Trajectory | None] = [None] * count
        self.engines = [-1] * count
        self.texts: list[list[str]] = [[] for _ in range(count)]  # turn, answer, turn, ...; see `read`
        self.errors = [""] * count
        self.rewards = [0.0] * count
        self.scored = 0  # trajectories
        self.failed = False  # a reward function or an environment did: it may be mended for a later attempt
        self.restored = False  # an interrupted attempt had finished it
        # More than one where an engine was lost or the environment spoke.
        self._parts: list[list[Part]] = [[] for _ in range(count)]
        self._answers: dict[int, Part] = {}  # by sample; part of the response once there is a next turn

    def take(self, sample: int, part: Part) -> None:
        """More of a response."""
        self._parts[sample].append(part)

    def answered(self, sample: int, ids: list[int]) -> None:
        """By the environment."""
        self._answers[sample] = Part(np.array(ids, np.int32), np.zeros(len(ids), np.float32), ())

    def tokens_so_far(self, sample: int) -> NDArray[np.int32]:
        """For the next request: the prompt, then what there is of the response."""
        if sample in self._answers:
            self._parts[sample].append(self._answers.pop(sample))
        return np.concatenate([np.array(self.prompt.token_ids, np.int32), *(p.ids for p in self._parts[sample])])

    def join(self, trajectory: TrajectoryId, finish: str) -> Trajectory:
        """A turn is complete, and with it the response, if it was the last."""
        parts = self._parts[trajectory.sample]
        spans: list[VersionSpan] = []
        at = 0
        for part in parts:
            for start, end, version in part.spans:
                if spans and spans[-1].version == version and spans[-1].end == at + start:
                    spans[-1] = VersionSpan(spans[-1].start, at + end, version)
                else:
                    spans.append(VersionSpan(at + start, at + end, version))
            at += len(part.ids)
        joined = self.trajectories[trajectory.sample] = Trajectory(
            id=trajectory,
            prompt_ids=np.array(self.prompt.token_ids, np.int32),
            output_ids=np.concatenate([p.ids for p in parts]),
            logprobs=np.concatenate([p.logprobs for p in parts]),
            versions=tuple(spans),
            finish=finish,
        )
        return joined

    @classmethod
    def of(cls, prompt: Prompt, kept: KeptGroup, decode: Callable[[list[int]], str]) -> HeldGroup:
        """As an interrupted attempt left it, all trajectories scored."""
        held = cls(prompt, len(kept.trajectories))
        held.trajectories = [kept.trajectory(sample) for sample in range(len(kept.trajectories))]
        for sample in range(len(kept.trajectories)):
            held.read(sample, decode)
        held.engines = [t.engine for t in kept.trajectories]
        held.rewards = [t.reward for t in kept.trajectories]
        held.scored, held.restored = len(kept.trajectories), True
        return held

    def read(self, sample: int, decode: Callable[[list[int]], str]) -> list[str]:
        """Its texts, to the last complete turn."""
        trajectory, texts = self.trajectories[sample], self.texts[sample]
        assert trajectory is not None
        ids = trajectory.output_ids
        texts += [decode(ids[start:end].tolist()) for start, end in trajectory.pieces[len(texts) :]]
        return texts

    def spec(self, group: GroupId) -> GroupSpec:
        """What the coordinator needs to know of it."""
        if not self.restored:
            return GroupSpec(group, len(self.prompt.token_ids))
        finished = self.finished()
        return GroupSpec(
            group,
            len(self.prompt.token_ids),
            output_tokens=tuple(len(t.output_ids) for t in finished),
            rewards=tuple(self.rewards),
            finishes=tuple(t.finish for t in finished),
            turns=tuple((len(t.pieces) + 1) // 2 for t in finished),
        )

    def kept(self, group: GroupId) -> KeptGroup:
        """For an attempt that comes after this one."""
        samples = enumerate(self.finished())
        return KeptGroup(
            group=group,
            prompt_ids=np.array(self.prompt.token_ids, np.int32).tobytes(),
            trajectories=tuple(
                KeptTrajectory(
                    output_ids=t.output_ids.tobytes(),
                    logprobs=t.logprobs.tobytes(),
                    versions=tuple((s.start, s.end, s.version) for s in t.versions),
                    finish=t.finish,
                    engine=self.engines[sample],
                    reward=self.rewards[sample],
                )
                for sample, t in samples
            ),
        )

    def finished(self) -> list[Trajectory]:
        return [t for t in self.trajectories if t is not None]

    def packed(self, rewards: tuple[float, ...], advantages: tuple[float, ...]) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
        """The group as it travels, and its trajectories' tokens (prompt and response)."""
        trajectories = self.finished()
        sequences = Sequences.of(trajectories, rewards, advantages)
        spans = [(t.id.sample, s.start, s.end, s.version) for t in trajectories for s in t.versions]
        return pack(sequences, np.array(spans, np.int32).reshape(-1, 4)), tuple(int(n) for n in sequences.lengths)

    def record(self, dump: TrajectoryDump, group: GroupId, iteration: int, advantages: tuple[float, ...] | None) -> None:
        """Into the trajectory dump."""
        for sample, trajectory in enumerate(self.finished()):
            dump.add(
                iteration=iteration,
                purpose="train" if group >= 0 else "eval",
                group=group,
                index=sample,
                prompt_id=self.prompt.prompt_id,
                prompt_text=self.prompt.text,
                response_text="".join(self.texts[sample]),
                prompt_ids=trajectory.prompt_ids,
                output_ids=trajectory.output_ids,
                logprobs=trajectory.logprobs,
                reward=self.rewards[sample],
                advantage=None if advantages is None else advantages[sample],
                finish=trajectory.finish,
                versions=[(s.start, s.end, s.version) for s in trajectory.versions],
                engine=self.engines[sample],
                error=self.errors[sample],
            )

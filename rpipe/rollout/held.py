"""What does the rollout side hold: where prompts come from, and a group's payload until the trainer has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rpipe.core.types import GroupId, Prompt, Sequences, Trajectory
from rpipe.data.order import Order
from rpipe.data.prompts import PromptSet
from rpipe.runtime.channel import pack
from rpipe.runtime.dump import TrajectoryDump


@dataclass(frozen=True, slots=True)
class RolloutData:
    """Prompts in their order, and the way back from ids to text."""

    train: PromptSet
    held_out: list[Prompt]
    order: Order
    reward_functions: dict[str, str]  # name -> where it was asked for
    decode: Callable[[list[int]], str]
    notes: list[str]  # what a person should know of the prompts


class HeldGroup:
    """The payload of one group: its prompt and what came back so far."""

    def __init__(self, prompt: Prompt, count: int) -> None:
        self.prompt = prompt
        self.trajectories: list[Trajectory | None] = [None] * count
        self.engines = [-1] * count
        self.texts = [""] * count
        self.errors = [""] * count
        self.rewards = [0.0] * count

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
                response_text=self.texts[sample],
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

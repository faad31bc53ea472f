"""What does the rollout coordinator take from a config?"""

from __future__ import annotations

from dataclasses import dataclass

from rpipe.policy.admission import Admission
from rpipe.policy.advantage import Advantage
from rpipe.policy.placement import Placement


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What the coordinator takes from the config: numbers and policies."""

    engines: int
    iterations: int
    max_new_tokens: int  # of a whole response: all turns and what the environment answers
    trajectory_deadline_s: float  # of generating, from its first tokens
    queue_bytes: int  # of groups sent and not yet received; beyond it nothing new is admitted
    admission: Admission
    placement: Placement
    advantage: Advantage
    max_turns: int = 1  # of a trajectory; with more, the environment answers
    engine_restarts: int = 3  # of one engine, without a publish in between
    slots_per_engine: int = 32  # trajectories that one engine runs at once
    drop_zero_variance: bool = False
    filter_function: str = ""  # named: groups are shown to it before they are sent
    over_sampling_groups: int = 0  # drawn with the R that are wanted
    refill_groups: int = 0  # that may be drawn later, in place of dropped ones
    shuffle_rewards: bool = False
    evaluate: bool = False
    evaluate_every_iterations: int = 0  # 0: before the first and after the last only

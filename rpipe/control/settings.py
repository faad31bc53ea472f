"""What do the two coordinators take from a config? The same for the job, a replay and the simulator."""

from __future__ import annotations

from rpipe.config import Config
from rpipe.control.rollout import RolloutSettings
from rpipe.control.training import TrainingSettings
from rpipe.policy.admission import Admission, Fifo, Frontier
from rpipe.policy.advantage import ADVANTAGES
from rpipe.policy.placement import GroupAffine, LeastLoaded


def rollout_settings(config: Config) -> RolloutSettings:
    """The policies that the config chose."""
    backfill = config.admission.backfill_tokens if config.admission.backfill == "kv_budget" else 0
    admission: Admission = Fifo() if config.admission.policy == "fifo" else Frontier(config.admission.frontier_groups, backfill)
    return RolloutSettings(
        engines=config.engines,
        iterations=config.run.iterations,
        max_new_tokens=config.rollout.max_new_tokens,
        trajectory_deadline_s=config.rollout.trajectory_deadline_s,
        queue_bytes=config.channel.queue_bytes,
        admission=admission,
        placement=LeastLoaded() if config.placement.policy == "least_loaded" else GroupAffine(),
        advantage=ADVANTAGES[config.training.loss.advantage],
        engine_restarts=config.engine.restarts,
        drop_zero_variance=config.rollout.filter == "zero_variance",
        shuffle_rewards=config.reward.shuffle,
        evaluate=config.evaluation.prompts > 0,
        evaluate_every_iterations=config.evaluation.every_iterations,
    )


def training_settings(config: Config) -> TrainingSettings:
    return TrainingSettings(
        mode=config.pipeline.mode,
        span_groups=config.training.packing == "global",
        groups_per_step=config.groups_per_step,
        replicas=config.replicas,
        micro_batch_tokens=config.training.micro_batch_tokens,
        iterations=config.run.iterations,
        checkpoint_every_iterations=config.run.checkpoint_every_iterations,
        stop_after_skipped_steps=config.training.optimizer.stop_after_skipped_steps,
    )

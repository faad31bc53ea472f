"""What do the two coordinators take from a config? The same for the job, a replay and the simulator."""

from __future__ import annotations

from rpipe.config import Config
from rpipe.control.rollout_settings import RolloutSettings
from rpipe.control.training import TrainingSettings
from rpipe.policy.admission import Admission, Fifo, Frontier, SoftFrontier
from rpipe.policy.advantage import ADVANTAGES
from rpipe.policy.placement import GroupAffine, LeastLoaded


def rollout_settings(config: Config) -> RolloutSettings:
    """The policies that the config chose."""
    return RolloutSettings(
        engines=config.engines,
        iterations=config.run.iterations,
        max_new_tokens=config.rollout.max_new_tokens,
        trajectory_deadline_s=config.rollout.trajectory_deadline_s,
        queue_bytes=config.channel.queue_bytes,
        admission=_admission(config),
        placement=LeastLoaded() if config.placement.policy == "least_loaded" else GroupAffine(),
        advantage=ADVANTAGES[config.training.loss.advantage],
        max_turns=config.rollout.max_turns,
        engine_restarts=config.engine.restarts,
        slots_per_engine=config.engine.max_running,
        drop_zero_variance=config.rollout.filter == "zero_variance",
        filter_function=config.filter_function,
        over_sampling_groups=config.over_sampling_groups,
        refill_groups=config.rollout.refill_groups,
        shuffle_rewards=config.reward.shuffle,
        evaluate=config.evaluation.prompts > 0,
        evaluate_every_iterations=config.evaluation.every_iterations,
    )


def _admission(config: Config) -> Admission:
    if config.admission.policy == "fifo":
        return Fifo()
    if config.admission.policy == "frontier":
        return Frontier(config.frontier_groups)
    width = None if config.admission.frontier_groups == "auto" else config.frontier_groups
    return SoftFrontier(width, config.groups_per_step, config.admission.budget_tokens)


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
        pipeline_stages=config.training.pp,
        peers=config.training.ep,
    )

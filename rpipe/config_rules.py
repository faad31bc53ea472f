"""Which configs cannot work though each key alone is right?

Asked once, when a config is made: the first answer is shown, in one line, with the nearest that would work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rpipe.config import Config


ENVIRONMENTS = ("calculator",)  # built in


def problems(c: Config) -> list[str]:
    """What cannot work, each with the nearest that would."""
    found: list[str] = []
    r, k, b = c.rollout.groups_per_iteration, c.rollout.trajectories_per_group, c.training.trajectories_per_step
    if b % k:
        found.append(
            f"training.trajectories_per_step = {b} is not a whole number of groups of K = {k};"
            f" nearest: {', '.join(str(x) for x in (b // k * k, (b // k + 1) * k) if x)}"
        )
    elif r * k % b:
        fits = [u * k for u in range(1, r + 1) if r % u == 0]
        below = [x for x in fits if x < b][-1:]
        above = [x for x in fits if x > b][:1]
        found.append(
            f"training.trajectories_per_step = {b} does not divide R x K = {r} x {k} = {r * k};"
            f" nearest: {', '.join(map(str, below + above))}"
        )
    if found:
        return found  # the figures below are meaningless then
    t = c.training
    if c.cluster.training_ranks % t.lockstep_ranks:
        ep, factor = (" x ep", f" x {t.ep}") if t.ep > 1 else ("", "")
        found.append(
            f"cluster.training_ranks = {c.cluster.training_ranks} is not tp x pp x cp{ep} x dp ="
            f" {t.tp} x {t.pp} x {t.cp}{factor} x dp; wanted: a multiple of {t.lockstep_ranks}"
        )
    if t.ep > 1 and t.cp > 1:
        found.append(f"training.ep = {t.ep} and cp = {t.cp}: experts are cut over data-parallel ranks; wanted: one of them 1")
    if c.cluster.rollout_ranks % c.engine.tp:
        found.append(
            f"cluster.rollout_ranks = {c.cluster.rollout_ranks} does not hold whole engines of engine.tp = {c.engine.tp}"
        )
    if c.pipeline.mode == "exact" and c.training.packing == "global":
        found.append("pipeline.mode = exact wants training.packing = group (a micro-batch must not depend on arrival)")
    if c.pipeline.max_staleness:
        found.append(f"pipeline.max_staleness = {c.pipeline.max_staleness}: only 0 (on-policy) is built")
    if c.evaluation.prompts and c.data.held_out is None:
        found.append(f"evaluation.prompts = {c.evaluation.prompts} wants data.held_out")
    from rpipe.config import BACKENDS  # here: config asks this module when it makes a config

    wants = BACKENDS[c.cluster.accelerator]
    if c.backend not in ("gloo", wants):
        found.append(
            f"channel.backend = {c.backend} does not run on cluster.accelerator = {c.cluster.accelerator};"
            f" wanted: gloo or {wants}"
        )
    return [*found, *_losses(c), *_one_device(c), *_not_built(c), *_without_effect(c)]


def _losses(c: Config) -> list[str]:
    loss = c.training.loss
    found: list[str] = []
    if loss.importance_cap is not None and c.pipeline.old_logprob != "pinned":
        found.append(
            f"training.loss.importance_cap = {loss.importance_cap:g} wants pipeline.old_logprob = pinned (with the engine's"
            " log-probs the ratio already holds what it would correct)"
        )
    if loss.advantage == "reinforce_pp" and c.pipeline.mode != "serial":
        found.append(
            f"training.loss.advantage = reinforce_pp is whitened over a step's trajectories, which are not all known while"
            f" pipeline.mode = {c.pipeline.mode} streams; wanted: pipeline.mode = serial, or rloo, grpo, dr_grpo"
        )
    if loss.objective == "gspo" and c.training.cp > 1:
        found.append(f"training.loss.objective = gspo wants whole sequences on a rank, not training.cp = {c.training.cp}")
    if loss.objective == "gspo" and loss.aggregation == "token_mean":
        found.append("training.loss.objective = gspo counts sequences; wanted: loss.aggregation = sequence_mean or fixed")
    if c.training.optimizer.offload and c.cluster.accelerator == "cpu":
        found.append("training.optimizer.offload: on a CPU the optimizer is in host memory already; wanted: false")
    return found


def _one_device(c: Config) -> list[str]:
    if c.cluster.share_device and (c.cluster.training_ranks > 1 or c.backend != "gloo"):
        return [
            "cluster.share_device wants cluster.training_ranks = 1 and channel.backend = gloo"
            " (NCCL and HCCL refuse a device that is twice in a communicator)"
        ]
    return []


def _not_built(c: Config) -> list[str]:
    found: list[str] = []
    if c.engine.kind == "scripted" and c.engine.tp > 1:
        found.append(f"engine.tp = {c.engine.tp}: a scripted engine is one wide; wanted: 1")
    return found


def _without_effect(c: Config) -> list[str]:
    """What would be accepted and do nothing, or something else than it says."""
    found: list[str] = []
    if c.admission.budget_tokens is not None and c.admission.policy != "soft_frontier":
        found.append("admission.budget_tokens wants admission.policy = soft_frontier")
    if c.rollout.filter not in ("none", "zero_variance") and not c.filter_function:
        found.append(f"rollout.filter = {c.rollout.filter!r}; wanted: none, zero_variance or package.module:function")
    environment, turns = c.rollout.environment, c.rollout.max_turns
    if environment and ":" not in environment and environment not in ENVIRONMENTS:
        found.append(f"rollout.environment = {environment!r}; wanted: {', '.join(ENVIRONMENTS)} or package.module:function")
    if bool(environment) != (turns > 1):
        found.append(
            f"rollout.max_turns = {turns} wants rollout.environment: who answers?"
            if turns > 1
            else f"rollout.environment = {environment} wants rollout.max_turns of at least 2: it answers between two turns"
        )
    for key in ("over_sampling", "refill_groups"):
        if c.rollout.filter == "none" and getattr(c.rollout, key) != type(c.rollout).model_fields[key].default:
            found.append(f"rollout.{key} = {getattr(c.rollout, key)} wants rollout.filter: without one no group is dropped")
    if c.rollout.top_k == 0 or c.rollout.top_k < -1:
        found.append(f"rollout.top_k = {c.rollout.top_k}; wanted: -1 (all) or at least 1")
    if c.limits.message_s < 2 * c.limits.heartbeat_s:
        found.append(
            f"limits.message_s = {c.limits.message_s:g} is less than two beats of limits.heartbeat_s = {c.limits.heartbeat_s:g}"
        )
    rate = c.training.optimizer
    if rate.minimum_learning_rate > rate.learning_rate:
        found.append(
            f"training.optimizer.minimum_learning_rate = {rate.minimum_learning_rate:g} is above"
            f" learning_rate = {rate.learning_rate:g}"
        )
    steps = c.run.iterations * c.steps_per_iteration
    if rate.schedule == "cosine" and rate.warm_up_steps >= steps:
        found.append(f"training.optimizer.warm_up_steps = {rate.warm_up_steps} leaves nothing of the run's {steps} steps")
    return found

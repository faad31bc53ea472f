"""What does a person see while the job runs?

Follows the rollout coordinator's events and commands and the trainer's reports; feeds the progress display and TensorBoard.
Nothing here is a source of figures: those come from the event log.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from rpipe.config import Config
from rpipe.control.rollout import RolloutCoordinator
from rpipe.core.events import (
    AnyCommand,
    AnyEvent,
    DropGroup,
    EndEvaluation,
    EndRollout,
    EngineRestarted,
    GroupsDrawn,
    GroupSpec,
    RequestRollout,
    RestartEngine,
    RolloutRequested,
    ScoreTrajectory,
    SendGroup,
    ToolFinished,
    TrajectoryScored,
    TurnFinished,
    WeightsOffered,
)
from rpipe.core.types import TrajectoryId
from rpipe.runtime.messages import StepReport, TrainerState
from rpipe.runtime.progress import Progress, ProgressState
from rpipe.runtime.scalars import Scalars

SHOW_EVERY_S = 0.1


@dataclass(slots=True)
class Tally:
    """One rollout, as far as it got."""

    started_t: float = 0.0
    rollout_s: float = 0.0
    lengths: list[int] = field(default_factory=list)  # sampled tokens of each response that was given to be scored
    begun: dict[TrajectoryId, tuple[int, int, bool]] = field(default_factory=dict)  # not yet: tokens, turns, the last one cut
    turns: int = 0  # of the responses in `lengths`
    truncated: int = 0  # of them: did not end by themselves
    scored: int = 0
    rewards: list[float] = field(default_factory=list)
    groups: int = 0
    trajectories: int = 0
    sent: int = 0
    failed_rewards: int = 0
    failed_tools: int = 0
    steps: list[StepReport] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + sum(tokens for tokens, _, _ in self.begun.values())

    def restored(self, specs: tuple[GroupSpec, ...]) -> None:
        """Some may come from an interrupted attempt, finished."""
        self.lengths += [tokens for spec in specs for tokens in spec.output_tokens]
        self.scored += sum(len(spec.output_tokens) for spec in specs)
        self.turns += sum(taken for spec in specs for taken in spec.turns)
        self.truncated += sum(finish != "stop" for spec in specs for finish in spec.finishes)


class Watch:
    def __init__(self, config: Config, progress: Progress, scalars: Scalars) -> None:
        self._config, self._progress, self._scalars = config, progress, scalars
        self._tally = Tally()
        self._phase = "starting"
        self._iteration = 0
        self._trainer = TrainerState(False, "", 0)
        self._reward: float | None = None
        self._held_out: float | None = None
        self._shown_t = 0.0

    def saw(self, t: float, what: AnyEvent | AnyCommand) -> None:
        tally = self._tally
        match what:
            case TurnFinished():
                tokens, turns, _ = tally.begun.get(what.trajectory, (0, 0, False))
                tally.begun[what.trajectory] = tokens + what.output_tokens, turns + 1, what.finish != "stop"
            case ScoreTrajectory():
                tokens, turns, cut = tally.begun.pop(what.trajectory)
                tally.lengths.append(tokens)
                tally.turns += turns
                tally.truncated += cut
            case ToolFinished():
                if what.error:
                    tally.failed_tools += 1
                    if tally.failed_tools <= 3:
                        self._progress.line(f"trajectory {what.trajectory}: {what.error}; it ends there")
            case TrajectoryScored():
                tally.scored += 1
                if what.error:
                    tally.failed_rewards += 1
                    if tally.failed_rewards <= 3:
                        self._progress.line(f"group {what.trajectory.group}: {what.error}; it scores 0")
            case SendGroup() | DropGroup():
                tally.rewards.extend(what.rewards)
                tally.sent += 1
            case RolloutRequested():
                self._trainer = TrainerState(self._trainer.busy, self._trainer.text, 0)
                self._tally = Tally(
                    started_t=t, groups=len(what.groups), trajectories=len(what.groups) * what.trajectories_per_group
                )
                self._tally.restored(what.groups)
            case RequestRollout():
                self._iteration = what.iteration
                self._phase = "rollout" if what.purpose == "train" else "evaluating"
            case GroupsDrawn():
                tally.groups += len(what.groups)
                tally.trajectories += len(what.groups) * self._config.rollout.trajectories_per_group
                tally.restored(what.groups)
            case EndRollout():
                tally.rollout_s = t - tally.started_t
                self._reward = statistics.fmean(tally.rewards)
                self._phase = "training"
                if not what.groups_sent:
                    self._progress.line(self._nothing_kept(what, tally))
                elif len(set(tally.rewards)) == 1 and len(tally.rewards) > 1:
                    self._progress.line(
                        f"every reward of iteration {what.iteration} was {tally.rewards[0]:g}: there is nothing to learn from;"
                        " look at the prompts, the reward function and rollout.max_new_tokens"
                    )
            case EndEvaluation():
                self._held_out = what.reward_mean
                self._progress.line(
                    f"held-out reward after {what.iteration} iterations: {what.reward_mean:.3f} ({what.count} prompts)"
                )
                self._scalars.write(what.iteration, {"held_out/reward": what.reward_mean})
            case WeightsOffered():
                self._phase = "publishing"
                if tally.steps:
                    self._write(t)
            case RestartEngine():
                self._progress.line(f"engine {what.engine} is started again, with weights of version {what.version}")
            case EngineRestarted():
                self._progress.line(
                    f"engine {what.engine} is back after {t - what.started_t:.0f} s, holding version {what.version}"
                )
            case _:
                pass

    def _nothing_kept(self, end: EndRollout, tally: Tally) -> str:
        equal = f"; every reward was {tally.rewards[0]:g}" if len(set(tally.rewards)) == 1 else ""
        return (
            f"iteration {end.iteration}: rollout.filter dropped all {end.groups_dropped} groups{equal}: nothing was trained;"
            " look at the prompts, the reward function and rollout.max_new_tokens"
        )

    def trainer(self, state: TrainerState) -> None:
        self._trainer = state
        if self._phase in ("starting", "warming up"):
            self._phase = "warming up" if state.text and state.busy else "starting"
            if state.text and state.busy:
                self._progress.line(state.text)

    def step(self, report: StepReport) -> None:
        self._tally.steps.append(report)
        if report.event.skipped:
            self._progress.line(f"step {report.event.step}: the gradient was not finite; the step was skipped")

    def show(self, coordinator: RolloutCoordinator, now_t: float) -> None:
        """At most every SHOW_EVERY_S."""
        if now_t - self._shown_t < SHOW_EVERY_S:
            return
        self._shown_t = now_t
        tally = self._tally
        elapsed_s = (tally.rollout_s or now_t - tally.started_t) if tally.groups else 0.0
        self._progress.update(
            ProgressState(
                iteration=self._iteration,
                iterations=self._config.run.iterations,
                phase=self._phase,  # type: ignore[arg-type]
                groups_total=tally.groups,
                groups_sent=tally.sent,
                groups_in_service=coordinator.groups_in_service,
                groups_deferred=coordinator.groups_deferred,
                groups_trained=self._trainer.groups_consumed,
                trajectories_done=tally.scored,
                trajectories_total=tally.trajectories,
                tokens_per_s=tally.tokens / elapsed_s if elapsed_s > 0 else 0.0,
                trainer=self._trainer_words(),
                reward_mean=self._reward,
                held_out=self._held_out,
                elapsed_s=now_t,
            )
        )

    def finish(self, coordinator: RolloutCoordinator, now_t: float) -> None:
        """The run ended normally: show the last iteration as what it is, whatever the trainer told last."""
        self._trainer = TrainerState(False, "", self._config.rollout.groups_per_iteration)
        self._shown_t = 0.0
        self.show(coordinator, now_t)

    def say(self, text: str) -> None:
        """A line above the display."""
        self._progress.line(text)

    def _trainer_words(self) -> str:
        state = self._trainer
        if state.busy:
            return state.text or "busy"
        return f"waiting for {state.text}" if state.text else "idle"

    def close(self) -> None:
        self._progress.close()
        self._scalars.close()

    def _write(self, t: float) -> None:
        """One iteration's scalars, once its weights are on their way."""
        tally, steps = self._tally, [r.event for r in self._tally.steps]
        tokens = max(1, sum(s.trained_tokens for s in steps))

        def mean(name: str) -> float:
            return sum((getattr(s, name) or 0.0) * s.trained_tokens for s in steps) / tokens

        total_s = t - tally.started_t
        busy_s = sum(r.busy_s for r in tally.steps)
        self._scalars.write(
            tally.steps[0].iteration,
            {
                "reward/mean": statistics.fmean(tally.rewards),
                "response/tokens_mean": statistics.fmean(tally.lengths),
                "response/tokens_max": float(max(tally.lengths)),
                "response/turns_mean": tally.turns / len(tally.lengths),
                "tools/failed": float(tally.failed_tools),
                "response/truncation_rate": tally.truncated / len(tally.lengths),
                "policy/loss": mean("loss"),
                "policy/entropy": mean("entropy"),
                "policy/clip_fraction": mean("clip_fraction"),
                "policy/kl": mean("kl"),
                "policy/logprob_gap_mean": steps[0].logprob_gap_mean or 0.0,
                "policy/logprob_gap_max": steps[0].logprob_gap_max or 0.0,
                "optimizer/grad_norm": statistics.fmean(s.grad_norm or 0.0 for s in steps),
                "optimizer/learning_rate": steps[-1].learning_rate,
                "optimizer/skipped_steps": float(sum(s.skipped for s in steps)),
                "time/rollout_s": tally.rollout_s,
                "time/rollout_to_train_end_s": total_s,
                "time/trainer_busy_s": busy_s,
                "time/trainer_waiting_s": max(0.0, total_s - busy_s),
                "time/generated_tokens_per_s": sum(tally.lengths) / max(tally.rollout_s, 1e-9),
            },
        )

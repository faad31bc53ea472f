"""Who performs what the rollout coordinator commands? Models of what rollout/driver.py and rollout/worker.py do.

A command that this file does not know is an error of mypy.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import assert_never

from rpipe.control.rollout import RolloutCoordinator
from rpipe.control.settings import rollout_settings
from rpipe.core import events as e
from rpipe.core.types import GroupId, TrajectoryId
from rpipe.sim.costs import engine_costs, publish_s
from rpipe.sim.driver import Log, drive
from rpipe.sim.engine import Request, SimulatedEngine
from rpipe.sim.trainer import Replica, Work
from rpipe.sim.workload import GroupWork

if TYPE_CHECKING:
    from rpipe.sim.job import SimulatedJob


@dataclass(slots=True)
class Turn:
    """One request from being sent to being answered."""

    request: Request
    command: e.SendTurn
    sent_t: float
    first_t: float = 0.0


class RolloutSide:
    """Engines, rewards, prompts: the rollout coordinator, and what it commands."""

    def __init__(self, job: SimulatedJob, log: Log) -> None:
        config, hardware, kernel = job.config, job.hardware, job.kernel
        self.job, self.log, self.kernel = job, log, kernel
        self.coordinator = RolloutCoordinator(rollout_settings(config))
        costs, shared = engine_costs(config), hardware.host
        self.engines = [
            SimulatedEngine(
                kernel,
                job.host,
                costs,
                config.engine.max_running,
                shared.engine_cores * config.engine.tp if shared else 1.0,
                hardware.prefill_batch_tokens,
                config.workload.speculation if config.workload else None,
                hardware.slow_engines.get(index, 1.0),
                shared.engine_token_s if shared else 0.0,
                shared.engine_weight if shared else 1.0,
            )
            for index in range(config.engines)
        ]
        self.work: dict[GroupId, GroupWork] = {}
        self._next_group = 0
        self._turns: dict[TrajectoryId, Turn] = {}
        self._bursts: dict[int, list[Turn]] = {}  # sent at this moment, by engine
        self._intakes = [Replica(kernel, job.host, 1.0) for _ in range(config.engines)]  # take requests in
        self._lives = [0] * config.engines  # how often each engine was lost
        self._reward_free_t = [0.0] * config.reward.workers  # heap
        self._publish_s = publish_s(config, config.engines)
        self._deadline_armed = False
        for index, t in sorted(hardware.lost_engines.items()):
            kernel.at(t, lambda index=index: self._lose(index))  # type: ignore[misc]

    def on(self, event: e.RolloutEvent) -> None:
        if drive(self.coordinator, self.log, event, self._perform):
            self._arm_deadline()

    def _arm_deadline(self) -> None:
        deadline_t = self.coordinator.next_deadline_t
        if deadline_t is not None and not self._deadline_armed:
            self._deadline_armed = True
            self.kernel.at(deadline_t, self._deadline)

    def _deadline(self) -> None:
        self._deadline_armed = False
        deadline_t = self.coordinator.next_deadline_t
        if deadline_t is not None and deadline_t <= self.kernel.now:
            self.on(e.DeadlinePassed(t=self.kernel.now))
        else:
            self._arm_deadline()

    def _perform(self, command: e.RolloutCommand) -> None:
        job, kernel = self.job, self.kernel
        match command:
            case e.SendTurn():
                self._send_turn(command)
            case e.RunTool():
                self._run_tool(command)
            case e.ScoreTrajectory():
                self._score(command.trajectory)
            case e.SendGroup():
                self._send_group(command)
            case e.AbortTurn():
                turn, engine = self._turns[command.trajectory], self.engines[command.engine]
                kernel.after(job.hardware.request_s, lambda: engine.abort(turn.request))
            case e.DropGroup(group=group, order=order, iteration=iteration):
                job.to_training(
                    lambda: job.training.on(e.GroupDropped(t=kernel.now, group=group, order=order, iteration=iteration))
                )
            case e.UpdateEngine(engine=index, version=version):
                self._update(index, version)
            case e.ConfirmWeights(version=version):
                job.to_training(lambda: job.training.published(version))
            case e.RequestRollout():
                kernel.after(job.hardware.draw_s, lambda: self._draw(command))
            case e.EndRollout():
                job.to_training(lambda: job.training.on(_ended(kernel.now, command)))
            case e.RequestGroups():
                kernel.after(job.hardware.draw_s, lambda: self._draw_more(command))
            case e.FilterGroup(group=group):  # a workload has no texts that a function could look at
                answer = e.GroupFiltered(t=kernel.now, group=group, keep=True, started_t=kernel.now)
                kernel.after(job.hardware.reward_s, lambda: self.on(msgspec.structs.replace(answer, t=kernel.now)))
            case e.FinishRun():
                job.kernel.stopped = job.training.coordinator.done
            case e.RestartEngine(engine=index, version=version):
                self._restart(index, version)
            case e.GiveUp(reason=reason):
                raise RuntimeError(f"the simulated job gave up: {reason}")
            case e.ServingComplete() | e.EndEvaluation():
                pass
            case _:
                assert_never(command)

    def _draw(self, command: e.RequestRollout) -> None:
        config, training = self.job.config, command.purpose == "train"
        samples = config.rollout.trajectories_per_group if training else 1
        count = config.rollout.groups_per_iteration + config.over_sampling_groups if training else config.evaluation.prompts
        first = command.iteration * config.most_groups
        ids = [first + i for i in range(count)] if training else [-1 - i for i in range(count)]
        self._next_group = first + count
        self.work = {group: self.job.source.group(group, command.iteration, samples) for group in ids}
        self.on(
            e.RolloutRequested(
                t=self.kernel.now,
                iteration=command.iteration,
                version=command.version,
                purpose=command.purpose,
                trajectories_per_group=samples,
                groups=tuple(e.GroupSpec(group, self.work[group].prompt_tokens) for group in ids),
            )
        )

    def _draw_more(self, command: e.RequestGroups) -> None:
        ids = range(self._next_group, self._next_group + command.count)
        self._next_group += command.count
        samples = self.job.config.rollout.trajectories_per_group
        self.work.update({group: self.job.source.group(group, command.iteration, samples) for group in ids})
        groups = tuple(e.GroupSpec(group, self.work[group].prompt_tokens) for group in ids)
        self.on(e.GroupsDrawn(t=self.kernel.now, iteration=command.iteration, groups=groups))

    # ---- engines

    def _send_turn(self, command: e.SendTurn) -> None:
        work, trajectory = self.work[command.trajectory.group], command.trajectory
        limit_tokens = self.job.config.rollout.max_new_tokens
        wants_tokens = command.history_tokens + work.turns[trajectory.sample][command.turn].output_tokens
        request = Request(
            trajectory=trajectory,
            prompt_tokens=work.prompt_tokens,
            output_tokens=min(wants_tokens, limit_tokens),
            limit_tokens=limit_tokens,
            priority=command.priority,
            generated=float(command.history_tokens + command.prefix_tokens),
            first=lambda r: self._first(r.trajectory),
            finish=lambda r, why: self._finish(r.trajectory, why),
        )
        turn = self._turns[trajectory] = Turn(request, command, self.kernel.now)
        burst = self._bursts.setdefault(command.engine, [])
        burst.append(turn)
        if len(burst) == 1:  # after all that is sent at this very moment
            self.kernel.after(0.0, lambda: self._submit(command.engine))

    def _submit(self, engine: int) -> None:
        """A burst reaches the engine as a whole, when the last of it is taken in: a core's work, one burst after another."""
        hardware, burst = self.job.hardware, self._bursts.pop(engine)

        def taken() -> None:
            for turn in burst:
                self._later(turn, partial(self.engines[engine].submit, turn.request), hardware.request_s)

        self._intakes[engine].give(Work(len(burst) * hardware.request_each_s, lambda began: taken()))

    def _later(self, turn: Turn, then: Callable[[], None], seconds: float) -> None:
        """On the way to or from the engine; what was on its way to a lost one is gone."""

        def arrive() -> None:
            if self._turns.get(turn.command.trajectory) is turn:
                then()

        self.kernel.after(seconds, arrive)

    def _first(self, trajectory: TrajectoryId) -> None:
        turn = self._turns[trajectory]

        def tell() -> None:
            turn.first_t = self.kernel.now
            self.on(e.TurnStarted(t=self.kernel.now, trajectory=trajectory, engine=turn.command.engine))

        self._later(turn, tell, self.job.hardware.message_s)

    def _finish(self, trajectory: TrajectoryId, why: str) -> None:
        turn = self._turns[trajectory]

        def tell() -> None:
            del self._turns[trajectory]
            self.on(
                e.TurnFinished(
                    t=self.kernel.now,
                    trajectory=trajectory,
                    engine=turn.command.engine,
                    output_tokens=int(turn.request.generated) - turn.command.history_tokens,
                    cached_tokens=turn.request.cached_tokens,
                    finish=why,  # type: ignore[arg-type]
                    started_t=turn.sent_t,
                    first_token_t=turn.first_t,
                    version=turn.command.version,
                )
            )

        self._later(turn, tell, self.job.hardware.message_s)

    def _lose(self, index: int) -> None:
        self.engines[index].lose()
        self._lives[index] += 1
        lost = [turn for turn in self._turns.values() if turn.command.engine == index]
        prefixes = []
        for turn in lost:
            del self._turns[turn.command.trajectory]
            made = int(turn.request.generated) - turn.command.history_tokens - turn.command.prefix_tokens
            prefixes.append(e.Prefix(turn.command.trajectory, max(made, 0)))
        self.on(e.EngineLost(t=self.kernel.now, engine=index, reason="hardware.lost_engines", prefixes=tuple(prefixes)))

    def _restart(self, index: int, version: int) -> None:
        began = self.kernel.now
        self.kernel.after(
            self.job.hardware.engine_start_s,
            lambda: self.on(e.EngineRestarted(t=self.kernel.now, engine=index, version=version, started_t=began)),
        )

    def _update(self, index: int, version: int) -> None:
        started_t = self.kernel.now + self.job.hardware.message_s

        life = self._lives[index]

        def updated() -> None:
            if self._lives[index] != life:
                return
            self.engines[index].flush()
            self.on(e.EngineUpdated(t=self.kernel.now, engine=index, version=version, started_t=started_t))

        self.kernel.at(started_t + self._publish_s, updated)

    # ---- rewards and groups

    def _run_tool(self, command: e.RunTool) -> None:
        """The workload's turns are what they are: after the last one the environment has nothing to say."""
        started_t, trajectory = self.kernel.now, command.trajectory
        turns = self.work[trajectory.group].turns[trajectory.sample]
        done = command.turn + 1 >= len(turns)

        def answer() -> None:
            tokens = 0 if done else turns[command.turn].answer_tokens
            event = e.ToolFinished(
                t=self.kernel.now,
                trajectory=trajectory,
                turn=command.turn,
                observation_tokens=tokens,
                done=done,
                started_t=started_t,
            )
            self.on(event)

        self._call_function(turns[command.turn].tool_s, answer)

    def _score(self, trajectory: TrajectoryId) -> None:
        started_t, work = self.kernel.now, self.work[trajectory.group]
        reward = work.rewards[trajectory.sample]
        self._call_function(
            work.reward_s[trajectory.sample],
            lambda: self.on(e.TrajectoryScored(t=self.kernel.now, trajectory=trajectory, reward=reward, started_t=started_t)),
        )

    def _call_function(self, seconds: float, then: Callable[[], None]) -> None:
        """In one of reward.workers processes, first come, first served."""
        ends_t = self.kernel.now
        if seconds:
            ends_t = max(heapq.heappop(self._reward_free_t), ends_t) + seconds
            heapq.heappush(self._reward_free_t, ends_t)
        self.kernel.at(ends_t + self.job.hardware.reward_s, then)

    def _send_group(self, command: e.SendGroup) -> None:
        record = self.coordinator.groups[command.group]
        tokens = tuple(record.prompt_tokens + t.output_tokens for t in record.trajectories)
        nbytes = record.channel_bytes
        hardware, training = self.job.hardware, self.job.training

        def arrived() -> None:
            training.on(
                e.GroupArrived(
                    t=self.kernel.now,
                    group=command.group,
                    order=command.order,
                    iteration=command.iteration,
                    version=command.version,
                    tokens=tokens,
                    nbytes=nbytes,
                )
            )
            self.job.to_rollout(lambda: self.on(e.GroupReceived(t=self.kernel.now, group=command.group)))

        trained = 0
        for t, turns in zip(record.trajectories, self.work[command.group].turns):
            trained += t.output_tokens - sum(turn.answer_tokens for turn in turns[: t.turn])
        training.tokens[command.group] = (tokens, trained)
        self.job.to_training(arrived, hardware.group_s + nbytes / hardware.channel_bytes_per_s)


def _ended(t: float, command: e.EndRollout) -> e.RolloutEnded:
    return e.RolloutEnded(
        t=t,
        iteration=command.iteration,
        version=command.version,
        groups_sent=command.groups_sent,
        groups_dropped=command.groups_dropped,
    )

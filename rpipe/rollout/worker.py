"""What does a rank that owns an engine do?

It starts the engine and then takes messages: StartTurn streams a response, CancelTurn cuts one short, Join and LoadWeights
take part in a publish. Answers go to the rollout coordinator through `reply`, which is a direct call on the coordinator's own
rank and MPI elsewhere. The engine's other ranks park.

The owner outlives its engine. It notices that the engine died or fell silent, says so once (EngineDown, with all that the
engine had made of its responses), and starts it again when told to (Restart), from a snapshot of the version that counts.
What was meant for an earlier life of the engine is not done.

    waits for            unblocked by                          bounded by
    the engine to start  its health                            engine.start_deadline_s
    a snapshot           the trainer's rename of it            engine.start_deadline_s
    tokens of a turn     the engine                            engine.stall_deadline_s, then it is lost
    an idle engine       its health, asked now and then        engine.stall_deadline_s, then it is lost
    a weight bucket      the trainer's broadcast               limits.collective_s, then it is lost
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from rpipe.config import Config
from rpipe.core.events import EngineLost, EngineRestarted, EngineUpdated, Prefix, TurnFinished, TurnStarted
from rpipe.core.types import TrajectoryId, Version
from rpipe.rollout.engine import Engine, EngineError, EngineGone, Sampling, TensorSpec, TurnRequest
from rpipe.runtime.messages import (
    AnyMessage,
    CancelTurn,
    Condemn,
    EngineBack,
    EngineDown,
    EngineFailed,
    EngineUp,
    Join,
    LoadWeights,
    Message,
    Partial,
    Restart,
    StartTurn,
    TurnBegan,
    TurnDone,
    WeightsLoaded,
)
from rpipe.training.snapshot import claim

LOOK_S = 0.2  # between looks at the engine


class Response:
    """What came of one turn so far."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[tuple[int, int, int]] = []  # (start, end, version)

    def add(self, ids: tuple[int, ...], logprobs: tuple[float, ...], version: Version) -> None:
        """Tokens of one version after another share a span."""
        start, end = len(self.ids), len(self.ids) + len(ids)
        if ids and self.spans and self.spans[-1][2] == version:
            self.spans[-1] = (self.spans[-1][0], end, version)
        elif ids:
            self.spans.append((start, end, version))
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)

    @property
    def packed(self) -> tuple[bytes, bytes, tuple[tuple[int, int, int], ...]]:
        return np.array(self.ids, np.int32).tobytes(), np.array(self.logprobs, np.float32).tobytes(), tuple(self.spans)


class EngineOwner:
    """Drives one engine. `reply` takes every answer; a failure is a message too, never an exception."""

    reply: Callable[[Message], None]  # set before `start`

    def __init__(self, engine: Engine, index: int, config: Config, clock: Callable[[], float], snapshots: Path) -> None:
        self.engine = engine
        self.index = index
        self._config = config
        self._clock = clock
        self._snapshots = snapshots  # where the trainer leaves them
        self._own_snapshot = snapshots / f"engine-{index:03d}"
        self._life = 0
        self._up = False
        self._buckets: tuple[tuple[TensorSpec, ...], ...] = ()
        self._joined = asyncio.Event()
        self._turns: dict[TrajectoryId, Response] = {}
        self._sign_t = 0.0  # of life
        self._publishing = 0  # joins and loads at work
        self._tasks: set[asyncio.Task[None]] = set()  # of the present life

    def handle(self, message: AnyMessage) -> None:
        """Begin what was asked; never blocks."""
        match message:
            case Restart():
                self._life, self._up = message.life, False
                self._begin(self._restart(message.version, self._abandon()))
            case CancelTurn():
                if self._up:
                    self._begin(self._cancel(message.trajectory))
            case StartTurn() | LoadWeights() | Join() | Condemn():
                if self._up and message.life == self._life:
                    self._handle(message)

    def _handle(self, message: StartTurn | LoadWeights | Join | Condemn) -> None:
        match message:
            case StartTurn():
                self._begin(self._turn(message))
            case Join():
                self._begin(self._in_publish(self._join(message)))
            case LoadWeights():
                self._begin(self._in_publish(self._load(message.version)))
            case Condemn():
                self._lose(message.reason)

    def state(self) -> str:
        """For a person who looks at a job that hangs."""
        doing = "at work" if self._up else "not up"
        silent_s = self._clock() - self._sign_t
        turns = ", ".join(f"{trajectory} ({len(r.ids)} tokens)" for trajectory, r in self._turns.items())
        return f"engine {self.index}: {doing} in life {self._life}, last sign {silent_s:.1f} s ago; turns: {turns or 'none'}"

    def start(self) -> None:
        self._begin(self._start())

    async def close(self) -> None:
        """Stop the engine; what still runs is abandoned."""
        await asyncio.gather(*self._abandon(), return_exceptions=True)
        await self.engine.stop()
        shutil.rmtree(self._own_snapshot, ignore_errors=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _abandon(self) -> list[asyncio.Task[None]]:
        """Everything that this life of the engine was doing, told to end."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        self._turns.clear()
        return tasks

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except EngineGone as error:
            self._lose(str(error))
        except EngineError as error:
            self.reply(EngineFailed(self.index, str(error)))
        except Exception as error:  # a bug of ours must end the job too, not a task nobody awaits
            self.reply(EngineFailed(self.index, f"engine {self.index}: {type(error).__name__}: {error}"))
            raise

    # ---- life

    async def _start(self) -> None:
        """The first time; what is wrong then is the config's, and no restart mends it."""
        began = self._clock()
        try:
            await self.engine.start()
            seconds = self._clock() - began
            kv_tokens = (await self.engine.load()).kv_tokens_capacity
        except EngineGone as error:
            raise EngineError(str(error)) from None
        self._stands()
        self.reply(EngineUp(self.index, seconds, kv_tokens))

    async def _restart(self, version: Version, before: list[asyncio.Task[None]]) -> None:
        began, life = self._clock(), self._life
        await asyncio.gather(*before, return_exceptions=True)
        await self.engine.stop()
        self._joined = asyncio.Event()
        try:
            folder, version = await self._claim(version) if version >= 0 else (None, version)
            await self.engine.start(folder, version)
        except EngineError as error:
            self.reply(EngineDown(life, EngineLost(t=self._clock(), engine=self.index, reason=str(error)), ()))
            return
        self._stands()
        self.reply(EngineBack(life, EngineRestarted(t=self._clock(), engine=self.index, version=version, started_t=began)))

    async def _claim(self, version: Version) -> tuple[Path, Version]:
        """The newest snapshot, and its version."""
        limit_s = self._config.engine.start_deadline_s
        end_t = self._clock() + limit_s
        while (found := claim(self._snapshots, version, self._own_snapshot)) is None:
            if self._clock() > end_t:
                raise EngineError(
                    f"engine {self.index}: no snapshot of version {version} came to {self._snapshots} within {limit_s:g} s"
                    " (engine.start_deadline_s)"
                )
            await asyncio.sleep(LOOK_S)
        return found

    def _stands(self) -> None:
        self._up = True
        self._sign_t = self._clock()
        self._begin(self._watch())

    async def _watch(self) -> None:
        """Raises EngineGone once the engine is dead or silent."""
        limit_s = self._config.engine.stall_deadline_s
        while True:
            await asyncio.sleep(LOOK_S)
            if (death := self.engine.death()) is not None:
                raise EngineGone(death)
            silent_s = self._clock() - self._sign_t
            if self._turns:
                if silent_s > limit_s:
                    raise EngineGone(
                        f"engine {self.index}: no token of any of {len(self._turns)} requests for {limit_s:g} s"
                        f" (engine.stall_deadline_s); see {self.engine.log_path}"
                    )
            elif silent_s > limit_s / 4 and not self._publishing:
                await self._ask(limit_s, silent_s)

    async def _ask(self, limit_s: float, silent_s: float) -> None:
        """An idle engine that stays silent is lost, too, `limit_s` after its last sign."""
        # At least: this process itself may have been held up, and its engine never asked.
        if await self.engine.healthy(max(limit_s - silent_s, limit_s / 4)):
            self._sign_t = self._clock()
        elif not self._turns and not self._publishing:  # else these tell
            silent_s = self._clock() - self._sign_t
            raise EngineGone(
                f"engine {self.index}: idle, silent for {silent_s:.0f} s and not healthy"
                f" (engine.stall_deadline_s = {limit_s:g}); see {self.engine.log_path}"
            )

    def _lose(self, reason: str) -> None:
        """Say it once, with what there is of its responses, and end what is left of it."""
        if not self._up:
            return
        self._up = False
        partials = tuple(Partial(trajectory, *response.packed) for trajectory, response in self._turns.items())
        prefixes = tuple(Prefix(trajectory, len(response.ids)) for trajectory, response in self._turns.items())
        self._abandon()
        event = EngineLost(t=self._clock(), engine=self.index, reason=reason, prefixes=prefixes)
        self.reply(EngineDown(self._life, event, partials))

    # ---- weights

    async def _in_publish(self, work: Coroutine[Any, Any, None]) -> None:
        """Whatever goes wrong there, started again from the snapshot the engine holds what it should."""
        self._publishing += 1
        try:
            await work
        except EngineError as error:
            raise EngineGone(str(error)) from None
        finally:
            self._publishing -= 1
            self._sign_t = self._clock()

    async def _join(self, message: Join) -> None:
        self._buckets = tuple(tuple(TensorSpec(t.name, t.dtype, t.shape) for t in bucket) for bucket in message.buckets)
        await self.engine.join_update_group(message.address, message.port, message.world_size, message.backend, message.group)
        self._joined.set()

    async def _load(self, version: Version) -> None:
        await self._joined.wait()
        began = self._clock()
        await self.engine.begin_update()
        for bucket in self._buckets:
            await self.engine.receive_bucket(bucket)
        await self.engine.end_update(version)
        self.reply(WeightsLoaded(EngineUpdated(t=self._clock(), engine=self.index, version=version, started_t=began)))

    # ---- turns

    async def _cancel(self, trajectory: TrajectoryId) -> None:
        """A task, as the turn is: tasks begin in order, so one that was asked for just before stands at the engine by now."""
        response = self._turns.get(trajectory)
        if response is not None:
            await self.engine.abort(response.request_id)

    async def _turn(self, message: StartTurn) -> None:
        trajectory, rollout = message.command.trajectory, self._config.rollout
        request = TurnRequest(
            request_id=f"{trajectory}:{message.command.turn}" if message.command.turn else str(trajectory),
            token_ids=np.frombuffer(message.token_ids, np.int32).tolist(),
            sampling=Sampling(
                max_new_tokens=message.max_new_tokens,
                temperature=message.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
            ),
            priority=message.command.priority,
            prefix_tokens=message.command.prefix_tokens,
        )
        if not self._turns:
            self._sign_t = self._clock()
        response = self._turns[trajectory] = Response(request.request_id)
        began, first, finish, cached = self._clock(), 0.0, "", 0
        async for chunk in self.engine.generate(request):
            self._sign_t = self._clock()
            if not first:
                first = self._sign_t
                self.reply(TurnBegan(TurnStarted(t=first, trajectory=trajectory, engine=self.index)))
            response.add(chunk.token_ids, chunk.logprobs, chunk.version)
            if chunk.finish is not None:
                finish, cached = chunk.finish, chunk.cached_tokens
        version = response.spans[-1][2] if response.spans else message.command.version
        event = TurnFinished(
            t=self._clock(),
            trajectory=trajectory,
            engine=self.index,
            output_tokens=len(response.ids),
            cached_tokens=cached,
            finish=finish,  # type: ignore[arg-type]
            started_t=began,
            first_token_t=first,
            version=version,
        )
        del self._turns[trajectory]
        self.reply(TurnDone(event, *response.packed))

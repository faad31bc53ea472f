"""What does a rank that owns an engine do?

It starts the engine and then takes messages: StartTurn streams a response, CancelTurn cuts one short, LoadWeights joins the
broadcast. Answers go to the rollout coordinator through `reply`, which is a direct call on the coordinator's own rank and
MPI elsewhere. The engine's other ranks park.

    waits for            unblocked by                          bounded by
    the engine to start  its health                            engine.start_deadline_s
    tokens of a turn     the engine                            engine.stall_deadline_s (inside the engine's adapter)
    a weight bucket      the trainer's broadcast               the group's timeout (limits.collective_s)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from rpipe.config import Config
from rpipe.core.events import EngineUpdated, TurnFinished, TurnStarted
from rpipe.core.types import Version
from rpipe.rollout.engine import Engine, EngineError, Sampling, TensorSpec, TurnRequest
from rpipe.runtime.messages import (
    AnyMessage,
    CancelTurn,
    EngineFailed,
    EngineUp,
    Join,
    LoadWeights,
    Message,
    StartTurn,
    TurnBegan,
    TurnDone,
    WeightsLoaded,
)


class EngineOwner:
    """Drives one engine. `reply` takes every answer; a failure is an EngineFailed, never an exception."""

    reply: Callable[[Message], None]  # set before `start`

    def __init__(self, engine: Engine, index: int, config: Config, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.index = index
        self._config = config
        self._clock = clock
        self._buckets: tuple[tuple[TensorSpec, ...], ...] = ()
        self._joined = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, message: AnyMessage) -> None:
        """Begin what was asked; never blocks."""
        match message:
            case StartTurn():
                self._begin(self._turn(message))
            case CancelTurn():
                self._begin(self.engine.abort(str(message.trajectory)))
            case Join():
                self._begin(self._join(message))
            case LoadWeights():
                self._begin(self._load(message.version))

    def start(self) -> None:
        self._begin(self._start())

    async def close(self) -> None:
        """Stop the engine; what still runs is abandoned."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.engine.stop()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except EngineError as error:
            self.reply(EngineFailed(self.index, str(error)))
        except Exception as error:  # a bug of ours must end the job too, not a task nobody awaits
            self.reply(EngineFailed(self.index, f"{type(error).__name__}: {error}"))
            raise

    async def _start(self) -> None:
        began = self._clock()
        await self.engine.start()
        seconds = self._clock() - began
        self.reply(EngineUp(self.index, seconds, (await self.engine.load()).kv_tokens_capacity))

    async def _join(self, message: Join) -> None:
        self._buckets = tuple(tuple(TensorSpec(t.name, t.dtype, t.shape) for t in bucket) for bucket in message.buckets)
        first = 1 + self.index * self._config.engine.tp
        await self.engine.join_update_group(message.address, message.port, first, message.world_size, message.backend)
        self._joined.set()

    async def _load(self, version: Version) -> None:
        await self._joined.wait()
        began = self._clock()
        await self.engine.begin_update()
        for bucket in self._buckets:
            await self.engine.receive_bucket(bucket)
        await self.engine.end_update(version)
        self.reply(WeightsLoaded(EngineUpdated(t=self._clock(), engine=self.index, version=version, started_t=began)))

    async def _turn(self, message: StartTurn) -> None:
        trajectory, rollout = message.command.trajectory, self._config.rollout
        request = TurnRequest(
            request_id=str(trajectory),
            token_ids=np.frombuffer(message.token_ids, np.int32).tolist(),
            sampling=Sampling(
                max_new_tokens=message.max_new_tokens,
                temperature=message.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
            ),
            priority=message.command.priority,
        )
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[tuple[int, int, int]] = []
        began, first, finish, cached = self._clock(), 0.0, "", 0
        async for chunk in self.engine.generate(request):
            if not first:
                first = self._clock()
                self.reply(TurnBegan(TurnStarted(t=first, trajectory=trajectory, engine=self.index)))
            if chunk.token_ids:
                spans = _extend(spans, len(ids), len(ids) + len(chunk.token_ids), chunk.version)
            ids.extend(chunk.token_ids)
            logprobs.extend(chunk.logprobs)
            if chunk.finish is not None:
                finish, cached = chunk.finish, chunk.cached_tokens
        version = spans[-1][2] if spans else message.command.version
        event = TurnFinished(
            t=self._clock(),
            trajectory=trajectory,
            engine=self.index,
            output_tokens=len(ids),
            cached_tokens=cached,
            finish=finish,  # type: ignore[arg-type]
            started_t=began,
            first_token_t=first,
            version=version,
        )
        self.reply(TurnDone(event, np.array(ids, np.int32).tobytes(), np.array(logprobs, np.float32).tobytes(), tuple(spans)))


def _extend(spans: list[tuple[int, int, int]], start: int, end: int, version: int) -> list[tuple[int, int, int]]:
    """Add tokens [start, end); joined to the last span if the version is the same."""
    if spans and spans[-1][2] == version:
        return [*spans[:-1], (spans[-1][0], end, version)]
    return [*spans, (start, end, version)]

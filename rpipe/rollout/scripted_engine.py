"""What would an engine do whose lengths and speed are given?

No model: ids and log-probs follow from the request's id and a seed, so they do not depend on timing; when they come follows
from the lengths, the speed at the present batch size, the running limit and the priorities. For tests of coordination and
scale, also in a real job (`engine.kind: scripted`), where it joins the real broadcast of weights and forgets what it gets.

The batch is shared evenly: while n requests run, each gets `tokens_per_s(n)` tokens a second. Time is integrated exactly
between wake-ups; waking is what costs, so nothing wakes more often than every `tick_s`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rpipe.config import Config
from rpipe.core.types import Version
from rpipe.rollout.engine import Chunk, EngineError, EngineGone, EngineLoad, TensorSpec, TurnRequest
from rpipe.rollout.scripted_options import Script
from rpipe.rollout.scripted_weights import WeightSink

Lengths = Callable[[TurnRequest], int]
Speed = Callable[[int], float]


@dataclass(eq=False)
class _Job:
    request: TurnRequest
    ids: list[int]
    logprobs: list[float]
    finish: str  # how it ends if nobody cuts it
    chunks: asyncio.Queue[Chunk | EngineError] = field(default_factory=asyncio.Queue)
    made: float = 0.0  # tokens so far, with the fraction of the next
    sent: int = 0

    @property
    def whole(self) -> int:
        return min(int(self.made + 1e-9), len(self.ids))


class ScriptedEngine:
    """An `Engine`. `clock` and `sleep` may be virtual. Its first `bad_lives` lives end `fail_after_s` after their first
    request, or fall silent after `hang_after_s`."""

    def __init__(
        self,
        lengths: Lengths,
        tokens_per_s: Speed = lambda running: 500.0,
        *,
        index: int = 0,
        max_running: int = 32,
        kv_tokens: int = 1 << 20,
        vocabulary: Sequence[int] = range(3, 98),
        eos_id: int = 1,
        seed: int = 0,
        stream_interval_tokens: int = 16,
        tp: int = 1,
        collective_s: float = 600.0,
        fail_after_s: float | None = None,
        hang_after_s: float | None = None,
        bad_lives: int = 1,
        tick_s: float = 0.002,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = f"engine {index}"
        self.version: Version = 0
        self.updates = 0  # end_update calls, over all lives
        self.weights = WeightSink(self.name, tp, collective_s)
        self._lengths, self._speed = lengths, tokens_per_s
        self._max_running, self._kv_tokens = max_running, kv_tokens
        self._vocabulary, self._eos_id, self._seed = vocabulary, eos_id, seed
        self._interval, self._tick_s = stream_interval_tokens, tick_s
        self._fail_after_s, self._hang_after_s, self._bad_lives = fail_after_s, hang_after_s, bad_lives
        self._silent = False
        self._ends_after_s: float | None = None  # in this life
        self._end_t: float | None = None  # once it was asked for something
        self._clock, self._sleep = clock, sleep
        self._queue: list[tuple[int, int, _Job]] = []  # heap: highest priority, then first come
        self._running: list[_Job] = []
        self._jobs: dict[str, _Job] = {}
        self._serial = itertools.count()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._dead = f"{self.name} (scripted): not started"
        self._paused = False
        self._has_memory = self._has_weights = True
        self._then_t = 0.0

    @classmethod
    def from_config(cls, config: Config, index: int) -> ScriptedEngine:
        """`engine.options` says lengths and speed; see scripted_options.Script. Raises EngineError on an option it lacks."""
        script = Script.read(config.engine.options)
        return cls(
            script.lengths(config.run.seed),
            script.speed,
            index=index,
            max_running=config.engine.max_running,
            kv_tokens=config.engine.kv_tokens or 1 << 20,
            vocabulary=range(*script.vocabulary),
            eos_id=script.eos_id,
            seed=config.run.seed,
            stream_interval_tokens=config.engine.stream_interval_tokens,
            tp=config.engine.tp,
            collective_s=config.limits.collective_s,
            fail_after_s=script.fail_after_s,
            hang_after_s=script.hang_after_s,
            bad_lives=script.bad_lives if script.bad_engine in (None, index) else 0,
        )

    @property
    def log_path(self) -> str:
        return "(scripted engines write no log)"

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self, folder: Path | None = None, version: Version = 0) -> None:
        await self.stop()
        self._dead = ""
        self.version = version
        self._silent = False
        self._paused = False
        self._has_memory = self._has_weights = True
        self._then_t = self._clock()
        self._wake = asyncio.Event()
        ends_after_s = self._hang_after_s if self._fail_after_s is None else self._fail_after_s
        self._ends_after_s, self._end_t = ends_after_s if self._bad_lives else None, None
        self._bad_lives = max(0, self._bad_lives - 1)
        self._task = asyncio.create_task(self._run(), name=f"{self.name} script")

    async def stop(self) -> None:
        self._die("stopped")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self.weights.leave()

    def _die(self, reason: str) -> None:
        self._dead = self._dead or f"{self.name} (scripted): {reason}"
        for job in self._jobs.values():
            job.chunks.put_nowait(EngineGone(self._dead))
        self._jobs.clear()
        self._running.clear()
        self._queue.clear()

    async def _run(self) -> None:
        """Sleep to the next chunk of any request, or until something changes, and hand out what is due."""
        while not self._dead:
            self._wake.clear()
            self._advance()
            if self._end_t is not None and self._clock() >= self._end_t:
                self._silent = self._fail_after_s is None
                if not self._silent:
                    self._die("ended as its script said (fail_after_s)")
                return  # a silent one leaves whoever waits for it waiting
            self._deliver()
            self._admit()
            wait_s = self._next_s()
            if self._end_t is not None:
                wait_s = min(wait_s, max(self._end_t - self._clock(), 0.0))
            await self._sleep_or_wake(wait_s)

    async def _sleep_or_wake(self, wait_s: float) -> None:
        if math.isinf(wait_s):
            await self._wake.wait()
            return
        wake = asyncio.ensure_future(self._wake.wait())
        nap = asyncio.ensure_future(self._sleep(max(wait_s, self._tick_s)))
        try:
            await asyncio.wait((wake, nap), return_when=asyncio.FIRST_COMPLETED)
        finally:
            wake.cancel()
            nap.cancel()

    # ---- the batch --------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Bring every running request up to now."""
        now = self._clock()
        if self._running and not self._paused:
            tokens = (now - self._then_t) * self._speed(len(self._running))
            for job in self._running:
                job.made += tokens
        self._then_t = now

    def _due(self, job: _Job) -> int:
        """At how many tokens the next chunk goes out: the first one at once, then by the interval."""
        return min(len(job.ids), 1 if job.sent == 0 else job.sent + self._interval)

    def _deliver(self) -> None:
        for job in [j for j in self._running if j.whole >= self._due(j)]:
            if job.whole == len(job.ids):
                self._end(job, job.finish)
            else:
                job.chunks.put_nowait(self._chunk(job))

    def _admit(self) -> None:
        while self._queue and len(self._running) < self._max_running and not self._paused:
            self._running.append(heapq.heappop(self._queue)[2])

    def _next_s(self) -> float:
        if not self._running or self._paused:
            return math.inf
        return min(self._due(j) - j.made for j in self._running) / self._speed(len(self._running))

    def _chunk(self, job: _Job, finish: str | None = None) -> Chunk:
        start, job.sent = job.sent, job.whole
        return Chunk(tuple(job.ids[start : job.sent]), tuple(job.logprobs[start : job.sent]), self.version, finish)

    def _end(self, job: _Job, finish: str | None) -> None:
        """Take it out of the engine; `finish` None says nothing to anybody."""
        if finish is not None:
            job.chunks.put_nowait(self._chunk(job, finish))
        self._jobs.pop(job.request.request_id, None)
        if job in self._running:
            self._running.remove(job)
        else:
            self._queue = [entry for entry in self._queue if entry[2] is not job]
            heapq.heapify(self._queue)
        self._wake.set()

    # ---- generation -------------------------------------------------------------------------------------------------

    async def generate(self, request: TurnRequest) -> AsyncIterator[Chunk]:
        self._check()
        if request.request_id in self._jobs:
            raise EngineError(f"{self.name}: request {request.request_id} is already running")
        job = self._jobs[request.request_id] = self._job(request)
        if self._ends_after_s is not None and self._end_t is None:
            self._end_t = self._clock() + self._ends_after_s
        heapq.heappush(self._queue, (-request.priority, next(self._serial), job))
        self._wake.set()
        try:
            while True:
                item = await job.chunks.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            if self._jobs.get(request.request_id) is job:
                self._advance()
                self._end(job, None)

    def _job(self, request: TurnRequest) -> _Job:
        done = request.prefix_tokens  # of the same response
        limit = request.sampling.max_new_tokens + done
        length = limit + 1 if request.sampling.ignore_eos else max(1, self._lengths(request))
        draw = random.Random(f"{self._seed}:{request.request_id}")
        count = min(length, limit)
        ids = draw.choices(self._vocabulary, k=count)
        logprobs = [-3.0 * draw.random() for _ in range(count)]
        if length <= limit:
            ids[-1] = self._eos_id
        return _Job(request, ids[done:], logprobs[done:], "stop" if length <= limit else "length")

    async def abort(self, request_id: str) -> None:
        self._check_alive()
        if self._silent:
            return
        job = self._jobs.get(request_id)
        if job is not None:
            self._advance()
            self._end(job, "abort")

    async def pause(self) -> None:
        self._check_alive()
        self._advance()
        self._paused = True
        self._wake.set()

    async def resume(self) -> None:
        self._check_alive()
        self._advance()
        self._paused = False
        self._wake.set()

    async def flush_cache(self) -> None:
        self._check_idle("flush its cache")

    async def load(self) -> EngineLoad:
        self._check_alive()
        used = sum(len(j.request.token_ids) + j.whole for j in self._running)
        return EngineLoad(len(self._running), len(self._queue), used, self._kv_tokens)

    def death(self) -> str | None:
        return self._dead or None

    async def healthy(self, bound_s: float) -> bool:
        return not self._dead and not self._silent

    # ---- weights and memory -----------------------------------------------------------------------------------------

    async def join_update_group(self, address: str, port: int, world_size: int, backend: str, name: str) -> None:
        self._check_alive()
        await self.weights.join(address, port, world_size, backend, name)

    async def begin_update(self) -> None:
        self._check_alive()

    async def receive_bucket(self, tensors: Sequence[TensorSpec]) -> None:
        self._check_alive()
        await self.weights.receive(tensors)

    async def end_update(self, version: Version) -> None:
        self._check_alive()
        self._advance()
        for job in self._running:  # what was made so far is the old version's
            if job.whole > job.sent:
                job.chunks.put_nowait(self._chunk(job))
        self.version = version
        self.updates += 1
        self._has_weights = self._has_memory

    async def release_memory(self) -> None:
        self._check_idle("release its memory")
        self._has_memory = self._has_weights = False

    async def resume_memory(self) -> None:
        self._check_alive()
        self._has_memory = True

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineGone(self._dead)

    def _check(self) -> None:
        self._check_alive()
        if not self._has_weights:
            raise EngineError(f"{self.name}: its memory was released; wanted: resume_memory, then an update of its weights")

    def _check_idle(self, wish: str) -> None:
        self._check_alive()
        if self._jobs:
            raise EngineError(f"{self.name} cannot {wish}: {len(self._jobs)} requests are running or queued")

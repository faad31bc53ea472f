"""What is each response worth, whatever the functions do?

A pool of worker processes that can be killed: a function that hangs costs its own deadline and scores 0, one that raises,
eats its memory or ends its process scores 0, and the next call finds a fresh worker. Workers are started by exec (an MPI
rank must not fork), hold neither MPI nor torch, and speak JSON lines over pipes.

    score()  -> queue -> a worker's pipe (cheap functions: up to 32 calls in it, others one)
    waits for              unblocked by
      a reply                the worker, in order
      a deadline             a timer on the oldest call in the pipe: SIGKILL, and the calls behind it go to another worker
      a worker's start       its hello, or START_S
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rpipe import config
from rpipe.core.types import Prompt
from rpipe.data.child import child_environment
from rpipe.rollout.reward_functions import CHEAP

START_S = 60.0  # a worker imports the functions
STOP_S = 5.0
_PIPELINED = 32  # cheap calls in one worker's pipe
_STARTS = 3  # in a row that may fail


class RewardError(RuntimeError):
    """No reward can be computed: a function does not load, or workers do not start. One line."""


@dataclass(frozen=True, slots=True)
class Score:
    """`error` is empty, or why there is no score (`reward` is then 0). Times are time.monotonic() of this machine."""

    reward: float
    started_s: float
    ended_s: float
    error: str = ""


@dataclass(slots=True, eq=False)
class _Call:
    number: int
    name: str
    line: bytes
    reply: asyncio.Future[Score]


class RewardPool:
    """`start`, then any number of concurrent `score`, then `close`; all in one event loop."""

    def __init__(self, settings: config.Reward, seed: int, log_path: Path | None = None) -> None:
        self._settings = settings
        self._seed = seed
        # What functions print. Open as long as the pool.
        self._log: IO[bytes] = open(log_path, "ab") if log_path else tempfile.TemporaryFile()  # noqa: SIM115
        self._functions: dict[str, str] = {}
        self._queue: deque[_Call] = deque()
        self._workers: set[_Worker] = set()  # ready for calls
        self._alive: set[_Worker] = set()  # every process that has not been reaped
        self._starting: set[asyncio.Task[None]] = set()
        self._sent = 0
        self._scheduled = False
        self._failure: RewardError | None = None
        self.isolation = ""  # after start: what keeps functions from the network
        self.replaced = 0  # workers

    async def start(self, functions: Mapping[str, str] | None = None) -> None:
        """Start the workers and load `functions` in each: name -> the key or line that asks for it (`PromptSet.rewards`).

        Raises RewardError naming that key where one does not load.
        """
        self._functions = dict(functions or {})
        results = await asyncio.gather(*(self._launch() for _ in range(self._settings.workers)), return_exceptions=True)
        for failed in (r for r in results if isinstance(r, BaseException)):
            await self.close()
            raise failed

    async def score(self, prompt: Prompt, response_text: str, response_tokens: int) -> Score:
        """Score one response by its prompt's function. Raises RewardError only where no worker can be had any more."""
        if self._failure:
            raise self._failure
        self._sent += 1
        call = _Call(self._sent, prompt.reward, b"", asyncio.get_running_loop().create_future())
        fields: list[Any] = [call.number, prompt.reward, "", response_text, prompt.answer, {}]
        if prompt.reward not in CHEAP:
            fields[2] = prompt.text
            fields[5] = {**prompt.metadata, "prompt_id": prompt.prompt_id, "response_tokens": response_tokens}
        call.line = json.dumps(fields, default=str).encode() + b"\n"
        self._queue.append(call)
        self._dispatch_soon()
        return await call.reply

    async def close(self) -> None:
        """End every worker. Calls that wait raise RewardError. Returns when the processes are gone, or after STOP_S."""
        self._fail(RewardError("the reward pool is closed"))
        for task in tuple(self._starting):
            task.cancel()
        for worker in tuple(self._alive):
            worker.kill()
        end = time.monotonic() + STOP_S
        while (self._alive or self._starting) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        self._log.close()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _dispatch_soon(self) -> None:
        if not self._scheduled:  # once a turn of the loop, so that a burst of calls is one write
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        chosen: dict[_Worker, list[_Call]] = {}
        while self._queue:
            call = self._queue[0]
            if call.reply.done():  # its caller gave up
                self._queue.popleft()
                continue
            worker = min((w for w in self._workers if w.takes(call)), key=lambda w: len(w.calls), default=None)
            if worker is None:
                break
            self._queue.popleft()
            worker.calls.append(call)
            chosen.setdefault(worker, []).append(call)
        for worker, calls in chosen.items():
            worker.send(calls, self._settings.deadline_s)

    def requeue(self, calls: deque[_Call]) -> None:
        """Calls that a worker had not begun go first."""
        self._queue.extendleft(reversed(calls))
        calls.clear()

    def _fail(self, failure: RewardError) -> None:
        self._failure = self._failure or failure
        for call in (*self._queue, *(c for w in self._alive for c in w.calls)):
            if not call.reply.done():
                call.reply.set_exception(self._failure)
        self._queue.clear()

    # ---- workers ----------------------------------------------------------------------------------------------------

    async def _launch(self) -> None:
        """One worker more. Raises RewardError."""
        worker = _Worker(self)
        await asyncio.get_running_loop().subprocess_exec(
            lambda: worker,
            *(sys.executable, "-m", "rpipe.rollout.reward_worker"),
            stderr=self._log,
            env=child_environment(),
            start_new_session=True,
        )
        self._alive.add(worker)
        hello = {"functions": list(self._functions), "memory_bytes": self._settings.memory_bytes, "seed": self._seed}
        worker.write(json.dumps(hello).encode() + b"\n")
        try:
            answer = await asyncio.wait_for(worker.hello, START_S)
        except asyncio.TimeoutError:
            worker.kill()
            raise RewardError(f"a reward worker loaded no functions ({self._names()}) in {START_S:.0f} s") from None
        except BaseException:
            worker.kill()
            raise
        for name, problem in answer["problems"].items():
            worker.kill()
            raise RewardError(f"{self._functions[name]} = {name}: {problem}")
        self.isolation = answer["isolation"]
        self._workers.add(worker)
        self._dispatch_soon()

    async def _replace(self) -> None:
        self.replaced += 1
        for attempt in range(1, _STARTS + 1):
            try:
                return await self._launch()
            except (RewardError, OSError) as error:
                if attempt == _STARTS:
                    self._fail(RewardError(f"reward workers do not start any more, {_STARTS} tries: {error}"))
                await asyncio.sleep(0.1 * attempt)

    def retire(self, worker: _Worker) -> None:
        """It takes no more calls; another is started in its place."""
        if worker in self._workers:
            self._workers.remove(worker)
            if not self._failure:
                task = asyncio.get_running_loop().create_task(self._replace())
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)

    def gone(self, worker: _Worker) -> None:
        """Its process has been reaped."""
        self.retire(worker)
        self._alive.discard(worker)
        self._dispatch_soon()

    def answered(self) -> None:
        if self._queue:
            self._dispatch_soon()

    def last_words(self) -> str:
        """The last line of the workers' log."""
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(f"/proc/self/fd/{self._log.fileno()}", os.O_RDONLY)
            with os.fdopen(descriptor, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
                lines = file.read().decode(errors="replace").strip().splitlines()
                return lines[-1] if lines else ""
        return ""

    def _names(self) -> str:
        return ", ".join(self._functions) or "none named"


class _Worker(asyncio.SubprocessProtocol):
    """One process, its calls in order, and the timer on the first of them."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._inner = 0  # the process in its own namespaces, where there is one
        self._partial = b""
        self._timer: asyncio.TimerHandle | None = None
        self._first_since = 0.0
        self._deadline_s = 0.0
        self._reaped = False
        self.calls: deque[_Call] = deque()
        self.hello: asyncio.Future[dict[str, Any]] = self._loop.create_future()

    def takes(self, call: _Call) -> bool:
        if not self.calls:
            return True
        return call.name in CHEAP and len(self.calls) < _PIPELINED and all(c.name in CHEAP for c in self.calls)

    def send(self, calls: list[_Call], deadline_s: float) -> None:
        """Write calls that are already in `self.calls`."""
        self.write(b"".join(c.line for c in calls))
        if len(self.calls) == len(calls):
            self._first_since = time.monotonic()
        if self._timer is None:
            self._deadline_s = deadline_s
            self._timer = self._loop.call_later(deadline_s, self._look)

    def write(self, data: bytes) -> None:
        self._transport.get_pipe_transport(0).write(data)

    def kill(self) -> None:
        """SIGKILL to the worker and what it started. Returns at once; the pool hears of it by `gone`."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._reaped or self._transport is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._inner:  # the outer process reaps it and ends
                os.kill(self._inner, signal.SIGKILL)
            else:
                os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def _look(self) -> None:
        """Has the first call had its time? The timer is set once, not for every call."""
        self._timer = None
        if not self.calls:
            return
        left = self._first_since + self._deadline_s - time.monotonic()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
            return
        self._blame(f"exceeded {self._deadline_s:g} s (reward.deadline_s)")
        self._give_up()

    def _blame(self, what: str) -> None:
        """The first call scores 0; those behind it had not begun."""
        call = self.calls.popleft()
        if not call.reply.done():
            call.reply.set_result(Score(0.0, self._first_since, time.monotonic(), f"reward {call.name} {what}"))

    def _give_up(self) -> None:
        self._pool.requeue(self.calls)
        self.kill()
        self._pool.retire(self)

    # ---- asyncio's calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            try:
                self._received(json.loads(line))
            except (ValueError, TypeError, IndexError, KeyError):  # a function wrote into our pipe
                if self.calls:
                    self._blame("broke its worker's pipe")
                return self._give_up()
        self._pool.answered()

    def _received(self, message: Any) -> None:
        if isinstance(message, int):
            self._inner = message
        elif isinstance(message, dict):
            if not self.hello.done():
                self.hello.set_result(message)
        else:
            number, reward, started, ended, error, last = message
            if number != self.calls[0].number:
                raise ValueError("out of order")
            call = self.calls.popleft()
            self._first_since = time.monotonic()
            if not call.reply.done():
                call.reply.set_result(Score(float(reward), started, ended, error))
            if last:
                self._give_up()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.kill()  # where it closed its pipe and lives on

    def process_exited(self) -> None:
        # Its last replies may still be in the pipe: they are read before the transport says connection_lost, but a
        # process that it left behind may hold the pipe open, hence the bound.
        self._reaped = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)
        self._loop.call_later(0.1, self._lost)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def _lost(self) -> None:
        if self not in self._pool._alive:
            return
        code = self._transport.get_returncode()
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        if not self.hello.done():
            words = self._pool.last_words()
            self.hello.set_exception(RewardError(f"a reward worker ended at its start ({how}){': ' + words if words else ''}"))
        if self.calls:
            self._blame(f"ended its worker ({how})")
        self._pool.requeue(self.calls)
        self._transport.close()
        self._pool.gone(self)

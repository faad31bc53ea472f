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
import fcntl
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rpipe import config
from rpipe.core.types import Prompt
from rpipe.data.child import child_environment
from rpipe.rollout.reward_functions import CHEAP
from rpipe.rollout.reward_process import Call, RewardError, Score, Worker

__all__ = ["RewardError", "RewardPool", "Score"]

MOST_PRINTED_BYTES = 8 << 20  # of what functions print; then it begins anew
START_S = 60.0  # a worker imports the functions
STOP_S = 5.0
_STARTS = 3  # in a row that may fail


class RewardPool:
    """`start`, then any number of concurrent `score`, then `close`; all in one event loop."""

    def __init__(self, settings: config.Reward, seed: int, log_path: Path | None = None) -> None:
        self._settings = settings
        self._seed = seed
        # What functions print. Open as long as the pool.
        self._log: IO[bytes] = open(log_path, "ab") if log_path else tempfile.TemporaryFile()  # noqa: SIM115
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)
        self._functions: dict[str, str] = {}
        self._queue: deque[Call] = deque()
        self._workers: set[Worker] = set()  # ready for calls
        self._alive: set[Worker] = set()  # every process that has not been reaped
        self._starting: set[asyncio.Task[None]] = set()  # of workers in place of others
        self._spawning: set[asyncio.Task[None]] = set()  # never cancelled
        self._sent = 0
        self._scheduled = False
        self._failure: RewardError | None = None
        self.isolation = ""  # after start: what keeps functions from the network
        self.replaced = 0  # workers

    async def start(self, functions: Mapping[str, str] | None = None) -> None:
        """Start the workers and load `functions` in each: name -> the key or line that asks for it (`PromptSet.rewards`).

        Raises RewardError naming that key where one does not load. Closed where it fails or is cancelled.
        """
        self._functions = dict(functions or {})
        launches = (self._launch() for _ in range(self._settings.workers))
        try:
            results = await asyncio.gather(*launches, return_exceptions=True)
            for failed in (r for r in results if isinstance(r, BaseException)):
                raise failed
        except BaseException:
            await self.close()
            raise

    async def score(self, prompt: Prompt, response_text: str, response_tokens: int, texts: Sequence[str] = ()) -> Score:
        """Score one response, of several turns the last, by its prompt's function; `texts` (turn, answer, turn, ...) is in its
        metadata's `turns`. Raises RewardError only where no worker can be had any more."""
        if prompt.reward in CHEAP:
            return await self._ask(prompt.reward, "", response_text, prompt.answer, {})
        metadata = {**prompt.metadata, "prompt_id": prompt.prompt_id, "response_tokens": response_tokens}
        if len(texts) > 1:
            metadata["turns"] = texts
        return await self._ask(prompt.reward, prompt.text, response_text, prompt.answer, metadata)

    async def keeps(self, name: str, prompt: Prompt, responses: list[str], rewards: list[float]) -> Score:
        """Ask a filter function `(prompt_text, responses, rewards, metadata) -> bool`; its answer is 0 or 1."""
        metadata = {**prompt.metadata, "prompt_id": prompt.prompt_id, "answer": prompt.answer}
        answer = await self._ask(name, prompt.text, responses, rewards, metadata)
        return replace(answer, error=answer.error.replace("reward ", "filter ", 1))

    async def answer(self, name: str, prompt: Prompt, texts: list[str]) -> Score:
        """Ask an environment `(prompt_text, texts, metadata) -> str | None`; its answer is the Score's `text`."""
        metadata = {**prompt.metadata, "prompt_id": prompt.prompt_id, "answer": prompt.answer}
        answer = await self._ask(name, prompt.text, texts, metadata, text=True)
        return replace(answer, error=answer.error.replace("reward ", "environment ", 1))

    async def _ask(self, name: str, *arguments: Any, text: bool = False) -> Score:
        """`text`: of the function a text is wanted, not a number."""
        if self._failure:
            raise self._failure
        self._sent += 1
        if os.fstat(self._log.fileno()).st_size > MOST_PRINTED_BYTES:  # a full file would fail what prints into it
            os.ftruncate(self._log.fileno(), 0)
        line = json.dumps([self._sent, name, arguments, text], default=str).encode() + b"\n"
        call = Call(self._sent, name, line, asyncio.get_running_loop().create_future())
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
        while (self._alive or self._starting or self._spawning) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        self._log.close()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _dispatch_soon(self) -> None:
        if not self._scheduled:  # once a turn of the loop, so that a burst of calls is one write
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        chosen: dict[Worker, list[Call]] = {}
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

    def requeue(self, calls: deque[Call]) -> None:
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
        worker = Worker(self)
        spawning = asyncio.get_running_loop().create_task(self._spawn(worker))
        self._spawning.add(spawning)
        spawning.add_done_callback(self._spawning.discard)
        await asyncio.shield(spawning)
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

    async def _spawn(self, worker: Worker) -> None:
        """To its end, once begun. Cancelled half-way, asyncio kills the process itself but not what that has started, and then
        waits, without a bound, for them to let go of its pipe."""
        await asyncio.get_running_loop().subprocess_exec(
            lambda: worker,
            *(sys.executable, "-m", "rpipe.rollout.reward_worker"),
            stderr=self._log,
            env=child_environment(),
            start_new_session=True,
        )
        self._alive.add(worker)
        if self._failure:  # closed meanwhile
            worker.kill()

    async def _replace(self) -> None:
        self.replaced += 1
        for attempt in range(1, _STARTS + 1):
            try:
                return await self._launch()
            except (RewardError, OSError) as error:
                if attempt == _STARTS:
                    self._fail(RewardError(f"reward workers do not start any more, {_STARTS} tries: {error}"))
                await asyncio.sleep(0.1 * attempt)

    def retire(self, worker: Worker) -> None:
        """It takes no more calls; another is started in its place."""
        if worker in self._workers:
            self._workers.remove(worker)
            if not self._failure:
                task = asyncio.get_running_loop().create_task(self._replace())
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)

    def gone(self, worker: Worker) -> None:
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

"""What does the parent know of one reward worker?

Its process, the calls in its pipe in order, and a timer on the first of them. It tells its pool when it is retired (takes
no more calls) and when it is gone (reaped).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rpipe.rollout.reward_functions import CHEAP, LARGEST

_LAST_WORDS_S = 0.5
_PIPELINED = 32  # cheap calls in one worker's pipe


class RewardError(RuntimeError):
    """No reward can be computed: a function does not load, or workers do not start. One line."""


@dataclass(frozen=True, slots=True)
class Score:
    """`error` is empty, or why there is no score (`reward` is then 0). Times are time.monotonic() of this machine. `text`: what
    an environment answered, None where it has no more to say."""

    reward: float
    started_s: float
    ended_s: float
    error: str = ""
    text: str | None = None


@dataclass(slots=True, eq=False)
class Call:
    number: int
    name: str
    line: bytes
    reply: asyncio.Future[Score]


class Pool(Protocol):
    """What a worker asks of its pool."""

    def requeue(self, calls: deque[Call]) -> None: ...
    def retire(self, worker: Worker) -> None: ...
    def gone(self, worker: Worker) -> None: ...
    def answered(self) -> None: ...
    def last_words(self) -> str: ...


class Worker(asyncio.SubprocessProtocol):
    """One process, its calls in order, and the timer on the first of them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._inner = 0  # the process in its own namespaces, where there is one
        self._partial = b""
        self._timer: asyncio.TimerHandle | None = None
        self._first_since = 0.0
        self._deadline_s = 0.0
        self._reaped = False
        self._gone = False
        self.calls: deque[Call] = deque()
        self.hello: asyncio.Future[dict[str, Any]] = self._loop.create_future()

    def takes(self, call: Call) -> bool:
        if not self.calls:
            return True
        return call.name in CHEAP and len(self.calls) < _PIPELINED and all(c.name in CHEAP for c in self.calls)

    def send(self, calls: list[Call], deadline_s: float) -> None:
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
            except (ValueError, TypeError, IndexError, RecursionError):  # a function wrote into our pipe
                if not self.hello.done():  # no worker of ours: leave it the moment to say why it ends
                    self._loop.call_later(_LAST_WORDS_S, self._give_up)
                    return
                if self.calls:
                    self._blame("broke its worker's pipe")
                return self._give_up()
        self._pool.answered()

    def _received(self, message: Any) -> None:
        if isinstance(message, int):
            self._inner = self._child(message)
        elif isinstance(message, dict):
            if not self.hello.done():
                self.hello.set_result(message)
        else:
            number, reward, started, ended, error, last, text = message
            if number != self.calls[0].number:
                raise ValueError("out of order")
            now = time.monotonic()
            if not (abs(reward) < LARGEST and started <= ended <= now and isinstance(error, str)):  # NaN, too
                raise ValueError("no score")
            if not (text is None or isinstance(text, str)):
                raise ValueError("no text")
            call = self.calls.popleft()
            self._first_since = now
            if not call.reply.done():
                call.reply.set_result(Score(float(reward), started, ended, error, text))
            if last:
                self._give_up()

    def _child(self, pid: int) -> int:
        """What is to be killed with the worker: its own child. Raises ValueError where a function names another process. The
        line may come after the hello: two processes write."""
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            if pid <= 0:
                raise ValueError("no process") from None
            return self._inner  # it has ended
        if parent != self._transport.get_pid():
            raise ValueError("not its child")
        return pid

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:  # where it closed its pipe and lives on
            self._loop.call_later(0.0 if self.hello.done() else _LAST_WORDS_S, self.kill)

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
        if self._gone:
            return
        self._gone = True
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

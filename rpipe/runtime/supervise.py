"""How does a job run under watch, and end so that nothing of it is left?

Waits for                     unblocked by                                    at most
the ranks' output             a rank printing, or 0.1 s                       -
the job's own end             the starter exiting                             the run itself
a safe point after a stop     ranks leaving (SIGUSR2 asked them to)           stop_s, then SIGTERM
the starter after SIGTERM     the starter exiting                             3 s, then SIGKILL of all
the others of a failed rank   the starter exiting                             stop_s, then SIGTERM as above
the starter without ranks     the starter exiting (an orphan of a rank        2 s, then SIGKILL to the orphans;
                              may hold its pipe)                              stop_s, then SIGTERM as above

Ctrl-C, SIGTERM and a hang-up ask for a stop; a second one does not wait for the safe point. SIGUSR2 alone is passed on.

At the end whatever descendants this process has beyond those it had before are the job's, and killed: one job at a time in a
process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from rpipe.runtime import processes
from rpipe.runtime.cause import Role, explain, first_failure
from rpipe.runtime.rundir import HANG_FILE

TERM_S = 3.0  # between SIGTERM and SIGKILL; Open MPI itself gives its ranks 0.3 s
KILL_S = 2.0  # for the kernel to end what got SIGKILL
RANKLESS_S = 2.0  # for the starter to end after its ranks did
LOOK_S = 0.5  # between looks at failure files and processes
ANSWER_S = 0.5  # for ranks to write their stacks
DRAIN_S = 1.0  # for the last lines in the pipes
TAIL_BYTES = 256 << 10
_STOP_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "hang-up"}
STOPPED_FILE = "stopped"  # left by a rank in the attempt's folder: the job was asked to stop and did
STOPPED_CODE = 75  # EX_TEMPFAIL: a batch script may requeue
_STOP_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int  # 0 ended; 130, 143, 129 stopped by Ctrl-C, SIGTERM, hang-up; 75 by USR2; 1 failed
    cause: str  # empty at a normal end


@dataclass(slots=True)
class _Requests:
    """What signal handlers noted; they do nothing else."""

    stop: signal.Signals | None = None
    stops: int = 0
    forward: int = 0

    def on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop = self.stop or signal.Signals(number)
        self.stops += 1

    def on_forward(self, number: int, frame: FrameType | None) -> None:
        self.forward += 1


@dataclass(slots=True)
class _Ending:
    """The escalation, once something asked for an end."""

    stop_s: float
    began: float | None = None
    terminated: float | None = None
    killed: bool = False

    def begin(self, now: float) -> bool:
        """Whether this call was the first."""
        first = self.began is None
        self.began = now if self.began is None else self.began
        return first

    def signal_due(self, now: float, at_once: bool) -> signal.Signals | None:
        if self.began is None or self.killed:
            return None
        if self.terminated is None and (at_once or now - self.began >= self.stop_s):
            self.terminated = now
            return signal.SIGTERM
        if self.terminated is not None and now - self.terminated >= TERM_S:
            self.killed = True
            return signal.SIGKILL
        return None


@dataclass(slots=True)
class _Streams:
    """Ranks' stdout to the terminal and the log; stderr (with the starter's own remarks) to the log alone."""

    process: subprocess.Popen[bytes]
    log: BinaryIO
    tail: bytearray = field(default_factory=bytearray)
    terminal: bool = True
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self.selector.register(stream, selectors.EVENT_READ)

    def pump(self, timeout_s: float) -> bool:
        """Pass on what is there; False once both ends are closed."""
        if not self.selector.get_map():
            time.sleep(timeout_s)
            return False
        for key, _ in self.selector.select(timeout_s):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self.selector.unregister(key.fileobj)
                continue
            with contextlib.suppress(OSError):  # a full disk: what matters goes to the terminal too
                self.log.write(data)
                self.log.flush()
            if key.fileobj is self.process.stderr:
                self.tail = (self.tail + data)[-TAIL_BYTES:]
            elif self.terminal:
                self._show(data)
        return True

    def drain(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.pump(0.05):
            pass

    def _show(self, data: bytes) -> None:
        try:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        except (OSError, ValueError):  # the reader went (`| head`): the job and its log go on
            self.terminal = False


def supervise(command: Sequence[str], env: Mapping[str, str], log: Path, stop_s: float, role: Role) -> Outcome:
    """Run the job to its end. `log` also names the attempt's folder, where ranks leave failure files.

    `env` holds RPIPE_JOB, by which members that are no descendants (Slurm's) are found. `role` names a rank's role.
    """
    processes.become_subreaper()
    before = processes.descendants(os.getpid())
    requests = _Requests()
    with log.open("ab", buffering=0) as file, _handlers(requests):  # unbuffered: closing must not fail on a full disk
        process = subprocess.Popen(
            list(command), env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C is ours to pass on
            preexec_fn=processes.terminate_with_parent,
        )  # fmt: skip
        streams = _Streams(process, file)
        try:
            _Watch(process, streams, requests, _Ending(stop_s), log.parent, before, env["RPIPE_JOB"]).run()
        finally:
            ended = processes.end_all(before, env["RPIPE_JOB"], KILL_S)
            code = process.wait()
            processes.reap_orphans(before)
            for path in log.parent.glob("stacks-rank*.txt"):
                if not path.stat().st_size:
                    path.unlink()
            streams.drain(DRAIN_S)
            if ended:
                file.write(f"rpipe: ended what was left of the job: processes {sorted(ended)}\n".encode())
    if requests.stop is not None:
        return Outcome(_STOP_CODES[requests.stop], f"stopped by {_STOP_NAMES[requests.stop]}")
    if code == 0 and first_failure(log.parent) is None:
        if (log.parent / STOPPED_FILE).exists():
            return Outcome(STOPPED_CODE, "stopped at a safe point; started again in the same run.dir, it goes on")
        return Outcome(0, "")
    return Outcome(1, explain(streams.tail.decode(errors="replace"), log.parent, code, role))


@dataclass(slots=True)
class _Watch:
    """Until the starter exits; whoever asks for an end gets one in bounded time."""

    process: subprocess.Popen[bytes]
    streams: _Streams
    requests: _Requests
    ending: _Ending
    attempt: Path
    before: set[int]
    job: str
    forwarded: int = 0
    looked: float = 0.0
    had_ranks: bool = False
    rankless_since: float | None = None
    asked: bool = False  # for stacks

    def run(self) -> None:
        while self.process.poll() is None:
            self.streams.pump(0.1)
            now = time.monotonic()
            self._pass_on(now)
            if now - self.looked >= LOOK_S:
                self.looked = now
                self._look(now)
            due = self.ending.signal_due(now, at_once=self.requests.stops > 1)
            if due is signal.SIGKILL:
                return  # end_all does it
            if due is not None:
                if self.requests.stops <= 1:
                    self._ask_for_stacks()
                processes.send(self.process.pid, due)

    def _pass_on(self, now: float) -> None:
        stop = self.requests.stop
        if stop is not None and self.ending.begin(now):
            within = f"within {self.ending.stop_s:.0f} s; once more to stop at once"
            _say(f"{_STOP_NAMES[stop]}: stopping at the next safe point, {within}")
            processes.send(self.process.pid, signal.SIGUSR2)
        if self.requests.forward > self.forwarded:
            self.forwarded = self.requests.forward
            processes.send(self.process.pid, signal.SIGUSR2)

    def _ask_for_stacks(self) -> None:
        """Once: what every rank was doing (runtime/hangs.py)."""
        if not self.asked:
            self.asked = True
            processes.send(self.process.pid, signal.SIGUSR1)
            self.streams.pump(ANSWER_S)

    def _look(self, now: float) -> None:
        if (self.attempt / HANG_FILE).exists():
            self._ask_for_stacks()
        if first_failure(self.attempt) is not None:  # that rank gave up; the others get stop_s
            self.ending.begin(now)
        if processes.has_children(self.process.pid):
            self.had_ranks, self.rankless_since = True, None
        elif self.had_ranks:
            self.rankless_since = self.rankless_since or now
            if now - self.rankless_since >= RANKLESS_S:
                self.ending.begin(now)
                self._end_orphans()

    def _end_orphans(self) -> None:
        ended = processes.end_all(self.before | {self.process.pid}, self.job, KILL_S)
        self.streams.log.write(f"rpipe: ended orphans of the ranks: processes {sorted(ended)}\n".encode() if ended else b"")


def _say(text: str) -> None:
    print(f"rpipe: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _handlers(requests: _Requests) -> Iterator[None]:
    """Signals note what is wanted while the job lives; the old handlers come back."""
    ours = dict.fromkeys(_STOP_CODES, requests.on_stop) | {signal.SIGUSR2: requests.on_forward}
    old = {number: signal.signal(number, handler) for number, handler in ours.items()}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)

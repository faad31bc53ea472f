"""How do small typed messages cross MPI without burning a core or blocking?

Sends are non-blocking and kept until delivered; receives are polled. A blocking MPI call would poll a core away, so the
callers sleep between polls. Messages between two ranks arrive in the order sent.

A rank whose peers are silent ends with `check_silence`; one that hangs in a call which never returns (a peer behind a cut
link) cannot ask. A watchdog, a thread without Python's lock, ends it `stuck_s` after its last poll, all its stacks in the log.
"""

from __future__ import annotations

import faulthandler
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from mpi4py import MPI

from rpipe.runtime.messages import Alive, AnyMessage, Message

TAG = 7
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class Mailbox:
    """Of one rank; used by one thread. It sends Alive to `peers` now and then, and knows how long each was silent."""

    def __init__(
        self,
        comm: Any,
        peers: tuple[int, ...] = (),
        heartbeat_s: float = 10.0,
        start_s: float = 0.0,
        stuck_s: float | None = None,
    ) -> None:
        self._comm = comm
        self._peers, self._heartbeat_s, self._stuck_s = peers, heartbeat_s, stuck_s
        self._watched = -heartbeat_s
        self._watch()
        self._beat = time.monotonic()
        self._heard = dict.fromkeys(peers, self._beat)
        self._start_s, self._starting = start_s, set(peers)  # those that have said nothing yet
        self._unsent: deque[tuple[Any, bytes]] = deque()
        self._status = MPI.Status()

    def send(self, rank: int, message: Message) -> None:
        body = _encoder.encode(message)
        self._unsent.append((self._comm.Isend([body, MPI.BYTE], dest=rank, tag=TAG), body))

    def poll(self) -> Iterator[tuple[int, AnyMessage]]:
        """What has arrived, oldest first per sender; also frees what was delivered and keeps the heart beating."""
        self.beat()
        while self._unsent and self._unsent[0][0].Test():
            self._unsent.popleft()
        while (handle := self._comm.Improbe(MPI.ANY_SOURCE, TAG, self._status)) is not None:
            source, body = self._status.Get_source(), bytearray(self._status.Get_count(MPI.BYTE))
            handle.Recv([body, MPI.BYTE])
            self._heard[source] = time.monotonic()
            self._starting.discard(source)
            message = _decoder.decode(body)
            if not isinstance(message, Alive):
                yield source, message

    def beat(self) -> None:
        """Tell the peers that this rank lives, if it is time; `poll` does it too."""
        self._watch()
        if time.monotonic() - self._beat > self._heartbeat_s:
            self._beat = time.monotonic()
            for peer in self._peers:
                self.send(peer, Alive())

    def _watch(self) -> None:
        """Wind the watchdog up again, at most once a heartbeat: it costs a thread."""
        if self._stuck_s is not None and time.monotonic() - self._watched >= self._heartbeat_s:
            self._watched = time.monotonic()
            faulthandler.dump_traceback_later(self._stuck_s, exit=True)

    def worked(self) -> None:
        """This rank was busy itself: silence counts from now."""
        self._heard = dict.fromkeys(self._heard, time.monotonic())

    def check_silence(self, limit_s: float, what: Callable[[], str]) -> None:
        """Raise TimeoutError naming the rank and `what` (asked only then: this is called at every poll) if any peer said
        nothing for `limit_s`, or since the start for `start_s` if that is more."""
        if not self._peers:
            return
        silent = min(self._peers, key=lambda peer: self._heard[peer])
        limit_s = max(limit_s, self._start_s) if silent in self._starting else limit_s
        if time.monotonic() - self._heard[silent] > limit_s:
            raise TimeoutError(f"heard nothing from rank {silent} for {limit_s:.0f} s; waiting for {what()}")

    def states(self) -> list[str]:
        """For a person: what is unsent, and who was silent for how long."""
        now = time.monotonic()
        silent = ", ".join(f"rank {peer} {now - heard:.1f} s ago" for peer, heard in sorted(self._heard.items()))
        return [f"{len(self._unsent)} messages not taken yet", f"heard last: {silent or 'nobody is asked to beat'}"]

    def drain(self, limit_s: float) -> None:
        """Return once everything sent is out of this process: call it before anything that stops MPI's progress."""
        end = time.monotonic() + limit_s
        while self._unsent:
            if self._unsent[0][0].Test():
                self._unsent.popleft()
            elif time.monotonic() > end:
                raise TimeoutError(f"rank {self._comm.rank}: {len(self._unsent)} messages were not taken in {limit_s:.0f} s")
            else:
                time.sleep(0.0005)

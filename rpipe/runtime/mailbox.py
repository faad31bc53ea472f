"""How do small typed messages cross MPI without burning a core or blocking?

Sends are non-blocking and kept until delivered; receives are polled. A blocking MPI call would poll a core away, so the
callers sleep between polls. Messages between two ranks arrive in the order sent.
"""

from __future__ import annotations

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

    def __init__(self, comm: Any, peers: tuple[int, ...] = (), heartbeat_s: float = 10.0) -> None:
        self._comm = comm
        self._peers, self._heartbeat_s = peers, heartbeat_s
        self._beat = time.monotonic()
        self._heard = dict.fromkeys(peers, self._beat)
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
            message = _decoder.decode(body)
            if not isinstance(message, Alive):
                yield source, message

    def beat(self) -> None:
        """Tell the peers that this rank lives, if it is time; `poll` does it too."""
        if time.monotonic() - self._beat > self._heartbeat_s:
            self._beat = time.monotonic()
            for peer in self._peers:
                self.send(peer, Alive())

    def worked(self) -> None:
        """This rank was busy itself: silence counts from now."""
        self._heard = dict.fromkeys(self._heard, time.monotonic())

    def check_silence(self, limit_s: float, what: Callable[[], str]) -> None:
        """Raise TimeoutError naming the rank and `what` (asked only then: this is called at every poll) if any peer said
        nothing for `limit_s`."""
        if not self._peers:
            return
        silent = min(self._peers, key=lambda peer: self._heard[peer])
        if time.monotonic() - self._heard[silent] > limit_s:
            raise TimeoutError(f"heard nothing from rank {silent} for {limit_s:.0f} s; waiting for {what()}")

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

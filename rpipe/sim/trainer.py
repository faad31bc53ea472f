"""What do the training ranks do? As the training driver: messages, then events and commands, then one piece of own work.

The coordinator's rank computes itself (it is part of replica 0) and is deaf meanwhile: what arrives is seen at the end of the
piece. A group is taken in between two pieces, and the rank waits for its tensors. Other replicas work through their own
queues; their answers wait until the coordinator listens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rpipe.sim.kernel import Host, Kernel


@dataclass(frozen=True, slots=True)
class Work:
    """`done` is called with when it began."""

    seconds: float
    done: Callable[[float], None]
    cores: float | None = None  # where it keeps more than its own ranks busy
    begin: Callable[[], None] | None = None  # called when its turn comes


class Replica:
    """One data-parallel replica: a queue of work, one piece at a time."""

    def __init__(self, kernel: Kernel, host: Host, cores: float) -> None:
        self.kernel, self.host, self.cores = kernel, host, cores
        self.busy = False
        self._queue: deque[Work] = deque()

    def give(self, work: Work) -> None:
        self._queue.append(work)
        if not self.busy:
            self._next()

    def _next(self) -> None:
        if self.busy or not self._queue:
            return
        work = self._queue.popleft()
        self.busy = True
        began = self.kernel.now

        def end() -> None:
            self.busy = False
            work.done(began)
            self._next()

        self.host.start(work.seconds, work.cores or self.cores, end)


class CoordinatorRank:
    """The rank that listens and computes by turns. `handle` sees what arrived; it may `queue` work."""

    def __init__(self, kernel: Kernel, host: Host, cores: float) -> None:
        self.kernel, self.host, self.cores = kernel, host, cores
        self._busy = False
        self._arrived: deque[tuple[float, Callable[[], None]]] = deque()  # seconds that taking it in takes, then what follows
        self._queue: deque[Work] = deque()

    def receive(self, then: Callable[[], None], taking_s: float = 0.0) -> None:
        """Something arrives: `then` happens once the rank listens and has taken it in."""
        self._arrived.append((taking_s, then))
        self._turn()

    def queue(self, work: Work) -> None:
        self._queue.append(work)
        self._turn()

    def _turn(self) -> None:
        """Whatever arrived comes before the next piece of work."""
        if self._busy:
            return
        if self._arrived:
            seconds, then = self._arrived.popleft()
            self._busy = True
            if seconds:
                self.kernel.after(seconds, lambda: self._took(then))
            else:
                self._took(then)
        elif self._queue:
            work = self._queue.popleft()
            self._busy = True
            if work.begin is not None:
                work.begin()
            began = self.kernel.now
            self.host.start(work.seconds, work.cores or self.cores, lambda: self._worked(work, began))

    def _took(self, then: Callable[[], None]) -> None:
        # Everything that arrived by now is handled before work goes on.
        then()
        while self._arrived and self._arrived[0][0] == 0.0:
            self._arrived.popleft()[1]()
        self._busy = False
        self._turn()

    def _worked(self, work: Work, began: float) -> None:
        work.done(began)
        self._busy = False
        self._turn()

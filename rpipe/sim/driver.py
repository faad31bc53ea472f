"""What does a simulated driver do with an event? What rollout/driver.py and training/driver.py do: decide, log, perform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from rpipe.core.events import Command, Event

EventT = TypeVar("EventT", bound=Event, contravariant=True)
CommandT = TypeVar("CommandT", bound=Command, covariant=True)


class Log(Protocol):
    """core.eventlog.EventLog, or a list in memory."""

    def event(self, event: Event) -> None: ...

    def command(self, t: float, command: Command) -> None: ...


class Coordinator(Protocol[EventT, CommandT]):
    @property
    def done(self) -> bool: ...

    def on(self, event: EventT) -> Sequence[CommandT]: ...


def drive(coordinator: Coordinator[EventT, CommandT], log: Log, event: EventT, perform: Callable[[CommandT], None]) -> bool:
    """False: the coordinator was done before, and the event counts for nothing."""
    if coordinator.done:
        return False
    log.event(event)
    for command in coordinator.on(event):
        log.command(event.t, command)
        perform(command)
    return True

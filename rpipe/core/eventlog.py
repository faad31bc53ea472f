"""What happened, in which order, on which rank?

`attempt-N/events/rank00000.jsonl`, one writer a file, one JSON object a line:

    {"v":1,"t":12.345,"rank":0,"seq":17,"io":"event","kind":"TurnFinished", ...the event's own fields}

`io` is "event" (into a coordinator), "command" (out of one) or "note" (a fact of the process: clock offset, versions,
a fault). `t` is the event's own time, for a command that of the event which caused it. Nothing derived is written; every
figure comes from reading it. A reader skips a torn last line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from rpipe.core.events import AnyCommand, AnyEvent, Command, Event

FORMAT = 1
_encoder = msgspec.json.Encoder()
_events: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_commands: msgspec.json.Decoder[AnyCommand] = msgspec.json.Decoder(AnyCommand)


class LogError(OSError):
    """The log cannot be written; a run without its record must not go on."""


class EventLog:
    """Appends one rank's records. An event is written out at once, commands by `flush` before they are performed: what a
    killed process did is in its log. Raises LogError."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"rank{rank:05d}.jsonl"
        self.rank = rank
        self.seq = 0
        self._file: BinaryIO = self.path.open("ab", buffering=1 << 16)

    def _write(self, t: float, io: str, body: bytes) -> None:
        head = f'{{"v":{FORMAT},"t":{t!r},"rank":{self.rank},"seq":{self.seq},"io":"{io}",'.encode()
        try:
            self._file.write(head + body[1:] + b"\n")
        except OSError as error:
            raise self._error(error) from None
        self.seq += 1

    def event(self, event: Event) -> None:
        """One that a coordinator is about to see. Its own `t` is the record's, written once."""
        fields = msgspec.to_builtins(event)
        self._write(fields.pop("t"), "event", _encoder.encode(fields))
        self.flush()

    def command(self, t: float, command: Command) -> None:
        """One of those that the last event caused; `flush` after the last of them."""
        self._write(t, "command", _encoder.encode(command))

    def note(self, t: float, kind: str, **fields: Any) -> None:
        self._write(t, "note", _encoder.encode({"kind": kind, **fields}))
        self.flush()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._error(error) from None

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> LogError:
        return LogError(f"{self.path}: the event log cannot be written: {error.strerror}")

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line as a dict. A torn last line is skipped; a damaged earlier one raises ValueError with its number."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{path}:{number}: not a record: {error}") from None


def steps(path: Path) -> Iterator[tuple[AnyEvent, list[AnyCommand]]]:
    """A coordinator's history: each event with the commands that it caused."""
    event: AnyEvent | None = None
    commands: list[AnyCommand] = []
    for record in records(path):
        io = record["io"]
        if io == "note":
            continue
        body = msgspec.json.encode({k: v for k, v in record.items() if k not in ("v", "rank", "seq", "io")})
        if io == "event":
            if event is not None:
                yield event, commands
            event, commands = _events.decode(body), []
        else:
            commands.append(_commands.decode(body))
    if event is not None:
        yield event, commands

"""What did the server say about one request, and which tokens of it are new?

`/generate` with `stream` and the server's `incremental_streaming_output` sends server-sent events, each with the ids and
log-probs that are new. `Assembler` turns them into Chunks. Three things make it more than a copy:

- A request aborted in the waiting queue after some tokens had been sent repeats the last id and all log-probs; the number
  of completed tokens tells what is new. SGLang merges events that wait, so the new part always comes first.
- An event says the version that the server held when it *spoke*, not when it sampled. Only the last event's spans are
  exact; so once the version differs from the one the request began with, tokens are kept back until the end.
- SGLang ends a request whose logits are NaN as if it had met a stop string.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rpipe.core.types import Version
from rpipe.rollout.engine import Chunk, EngineError


class Span(msgspec.Struct):
    version: str
    start: int
    end: int


class FinishReason(msgspec.Struct):
    type: str  # stop | length | abort
    matched: Any = None
    message: str = ""
    status_code: int | None = None  # an error that ended the request, not a wish


class Meta(msgspec.Struct):
    weight_version: str = "0"
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    weight_versions: list[Span] | None = None


class ServerEvent(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: Meta | None = None
    error: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(ServerEvent)
_PREFIX = b"data: "
_DONE = b"[DONE]"


class EventSplitter:
    """Bytes in, whole events out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[ServerEvent]:
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        events = []
        for part in whole:
            body = part.removeprefix(_PREFIX)
            if body and body != _DONE:
                events.append(_decoder.decode(body))
        return events


class Assembler:
    """One request's events in, its Chunks out. Raises EngineError where the server gave up on the request."""

    def __init__(self, version: Version) -> None:
        self.version = version  # what the engine held when the request was sent
        self.finished = False
        self._received = 0
        self._emitted = 0
        self._ids: list[int] = []  # received and not emitted
        self._logprobs: list[float] = []

    def feed(self, event: ServerEvent) -> list[Chunk]:
        meta = event.meta_info
        if event.error is not None or meta is None:
            raise EngineError(str((event.error or {}).get("message", "an event without meta_info")))
        reason = meta.finish_reason
        if reason is not None:
            _refuse_failure(reason)
        self._take(event.output_ids, meta)
        if reason is not None:
            self.finished = True
            return self._last(reason.type, meta)
        if int(meta.weight_version) != self.version or not self._ids:
            return []
        return [self._chunk(len(self._ids), self.version)]

    def abandon(self) -> list[Chunk]:
        """The request is cut off here, not by the server: what is known so far ends it."""
        self.finished = True
        return self._last("abort", Meta(weight_version=str(self.version)))

    def _take(self, ids: list[int], meta: Meta) -> None:
        new = meta.completion_tokens - self._received
        if not 0 <= new <= min(len(ids), len(meta.output_token_logprobs)):
            raise EngineError(
                f"of {meta.completion_tokens} tokens {self._received} had come, then {len(ids)} ids and"
                f" {len(meta.output_token_logprobs)} log-probs"
            )
        for logprob, _, _ in meta.output_token_logprobs[:new]:
            if logprob is None:
                raise EngineError("a log-prob is not a number: the weights hold NaN or infinity")
            self._logprobs.append(logprob)
        self._ids += ids[:new]
        self._received += new

    def _last(self, finish: str, meta: Meta) -> list[Chunk]:
        spans = meta.weight_versions or [Span(meta.weight_version, 0, self._received)]
        chunks = []
        for span in spans:
            count = min(span.end, self._received) - self._emitted
            if count > 0:
                chunks.append(self._chunk(count, int(span.version)))
        tail = chunks.pop() if chunks else Chunk((), (), int(spans[-1].version))
        return [*chunks, Chunk(tail.token_ids, tail.logprobs, tail.version, finish, meta.cached_tokens)]

    def _chunk(self, count: int, version: Version) -> Chunk:
        chunk = Chunk(tuple(self._ids[:count]), tuple(self._logprobs[:count]), version)
        del self._ids[:count], self._logprobs[:count]
        self._emitted += count
        return chunk


def _refuse_failure(reason: FinishReason) -> None:
    if reason.type == "abort" and reason.status_code is not None:
        raise EngineError(f"the request was refused: {reason.message}")
    if reason.matched == "NaN happened":
        raise EngineError("the logits were NaN: the weights hold NaN or infinity")
    if reason.type not in ("stop", "length", "abort"):
        raise EngineError(f"finish reason {reason.type!r}; wanted: stop, length or abort")

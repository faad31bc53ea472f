"""What does rpipe ask of an inference engine?

One engine is one replica of the model, `engine.tp` devices wide. Everything is by token ids. Two implementations:
`sglang_engine.SglangEngine` (SGLang's server as a child process) and `scripted_engine.ScriptedEngine` (given lengths and
speeds, no model; for tests of coordination and scale).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rpipe.core.types import Version


class EngineError(RuntimeError):
    """The engine refused or failed. The message says what and where its log is."""


class EngineGone(EngineError):
    """The engine itself is lost: it died, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. Log-probs returned are log_softmax(logits / temperature), before top-p and top-k."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TurnRequest:
    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    priority: int = 0  # higher goes first
    prefix_tokens: int = 0  # of `token_ids`, at its end: this turn so far, made by an engine that was lost


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a response, in order and without overlap."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: Version  # of the weights that sampled these tokens
    finish: str | None = None  # on the last chunk: stop | length | abort
    cached_tokens: int = 0  # on the last chunk: prompt tokens found in the prefix cache


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int
    queued: int
    kv_tokens_used: int
    kv_tokens_capacity: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One weight in a broadcast, under its Hugging Face name."""

    name: str
    dtype: str  # "float32", "bfloat16"
    shape: tuple[int, ...]


class Engine(Protocol):
    """Every method raises EngineError where the engine cannot answer within its bound."""

    @property
    def log_path(self) -> str: ...

    async def start(self, folder: Path | None = None, version: Version = 0) -> None:
        """Return once it can generate, with the weights in `folder` (None: what the run began from), which are `version`.
        May be called again after `stop`."""
        ...

    def death(self) -> str | None:
        """Why its process is gone; None while it lives. Costs nothing."""
        ...

    def generate(self, request: TurnRequest) -> AsyncIterator[Chunk]:
        """Stream a response; ends after the chunk with `finish`. Abandoning the iterator aborts the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """The request's stream ends with finish "abort" and keeps what it had. Unknown ids are ignored."""
        ...

    async def pause(self) -> None:
        """Stop decoding; running requests wait with what they have."""
        ...

    async def resume(self) -> None: ...

    async def flush_cache(self) -> None:
        """Drop the prefix cache. Nothing may be running."""
        ...

    async def load(self) -> EngineLoad: ...

    async def healthy(self, bound_s: float) -> bool:
        """Whether it can generate now; False where it does not say so within `bound_s`."""
        ...

    async def join_update_group(self, address: str, port: int, world_size: int, backend: str, name: str) -> None:
        """Join the weight broadcast of that name as ranks 1 .. tp; rank 0 is the trainer. Once in an engine's life."""
        ...

    async def begin_update(self) -> None: ...

    async def receive_bucket(self, tensors: Sequence[TensorSpec]) -> None:
        """Receive these broadcasts, in this order. Returns when they are loaded."""
        ...

    async def end_update(self, version: Version) -> None:
        """The weights received are `version`: chunks say so from now on; the prefix cache is empty."""
        ...

    async def release_memory(self) -> None:
        """Give up weights and KV cache; nothing may be running."""
        ...

    async def resume_memory(self) -> None:
        """Take memory again. Weights must be sent before the next request."""
        ...

    async def stop(self) -> None:
        """End the engine and everything it started. Never raises."""
        ...

"""Which lengths and speeds does `engine.options` ask of a scripted engine?"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rpipe.rollout.engine import EngineError, TurnRequest


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"distribution": "lengths"}):
    distribution: str = "lognormal"  # key `lengths`: lognormal | uniform | constant
    median_tokens: float = 64.0  # uniform: 1 .. 2 x median
    sigma: float = 1.0  # lognormal
    tokens_per_s: float = 500.0  # of one request, however many run
    engine_tokens_per_s: float = math.inf  # of all together
    vocabulary: tuple[int, int] = (3, 98)  # ids drawn from [first, last)
    eos_id: int = 1
    fail_after_s: float | None = None  # this long after its first request the engine is dead
    hang_after_s: float | None = None  # or: it says nothing any more
    bad_lives: int = 1  # how many of its starts end so
    bad_engine: int | None = None  # which engine; default every one

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Script:
        """Raises EngineError with one line that names the option."""
        try:
            script = msgspec.convert(dict(options), cls, strict=False)
        except msgspec.ValidationError as error:
            raise EngineError(f"engine.options of a scripted engine: {error}") from None
        if script.distribution not in ("lognormal", "uniform", "constant"):
            raise EngineError(f"engine.options.lengths = {script.distribution!r}; wanted: lognormal, uniform or constant")
        for name in ("median_tokens", "tokens_per_s", "engine_tokens_per_s"):
            if not getattr(script, name) > 0:
                raise EngineError(f"engine.options.{name} = {getattr(script, name)}; wanted: more than 0")
        return script

    def speed(self, running: int) -> float:
        """Tokens a second of each of `running` requests."""
        return min(self.tokens_per_s, self.engine_tokens_per_s / max(running, 1))

    def lengths(self, seed: int) -> Callable[[TurnRequest], int]:
        """A response's length follows from the request's id and the seed alone."""

        def length(request: TurnRequest) -> int:
            draw = random.Random(f"{seed}:length:{request.request_id}")
            if self.distribution == "constant":
                return max(1, round(self.median_tokens))
            if self.distribution == "uniform":
                return draw.randint(1, max(1, round(2 * self.median_tokens)))
            return max(1, round(self.median_tokens * math.exp(self.sigma * draw.gauss(0.0, 1.0))))

        return length

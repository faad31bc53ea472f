"""What does one engine do with its requests? Continuous batching as SGLang's scheduler, step by step but not one by one.

A step is a prefill of what may enter, or one token (several with speculation) for every running request. Between two changes
of the running batch all steps cost alike, so the engine jumps to the next change: a request ends, one enters, one is
aborted, or the KV cache is full. O(log n) a change.

    enters      highest priority first, then first come; while fewer than max_running run and what it and the running ones
                may still need fits: new_token_ratio x what they may generate, as SGLang estimates it
    full        the request with the fewest tokens is retracted; it waits again, and keeps its tokens to prefill them anew
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

from rpipe.config_simulation import Speculation
from rpipe.core.types import TrajectoryId
from rpipe.sim.costs import EngineCosts
from rpipe.sim.kernel import Host, Job, Kernel
from rpipe.sim.prefix_cache import PrefixCache

CLIP_TOKENS = 4096  # SGLang looks no further ahead for one request
RATIO_START, RATIO_LEAST, RATIO_STEPS = 0.7, 0.098, 600  # new_token_ratio: from, to, in so many steps
EPSILON = 1e-6


@dataclass(slots=True, eq=False)
class Request:
    """`finish` is called once: (request, why it ended)."""

    trajectory: TrajectoryId
    prompt_tokens: int
    output_tokens: int  # that it will have generated when it stops
    limit_tokens: int  # that it may generate
    priority: int
    first: Callable[[Request], None]
    finish: Callable[[Request, str], None]
    number: int = 0
    cached_tokens: int = 0
    generated: float = 0.0  # before it entered the last time (retraction, an earlier engine)
    entered: float = 0.0  # the engine's progress when it entered
    started: bool = False
    running: bool = False
    ended: bool = False


class SimulatedEngine:
    """`submit`, `abort`, `flush`; answers come by the request's own callbacks, at the time of the step that caused them."""

    def __init__(
        self,
        kernel: Kernel,
        host: Host,
        costs: EngineCosts,
        max_running: int,
        cores: float = 1.0,
        prefill_batch_tokens: int = 8192,
        speculation: Speculation | None = None,
        slowdown: float = 1.0,
        token_core_s: float = 0.0,
        weight: float = 1.0,  # on its host
    ) -> None:
        self.kernel, self.host, self.costs = kernel, host, costs
        self.max_running, self.cores, self.prefill_batch_tokens = max_running, cores, prefill_batch_tokens
        self.speculation, self.token_core_s, self.weight = speculation, token_core_s, weight
        self.cache = PrefixCache(costs.kv_tokens)
        self.retractions = 0
        self.steps = 0
        self.slowdown = slowdown  # of all its work
        self._waiting: list[tuple[int, int, Request]] = []  # heap: -priority, arrival
        self._running: dict[Request, None] = {}
        self._ends: list[tuple[float, int, Request]] = []  # heap: progress at its last token
        self._aborts: list[Request] = []
        self._arrivals = 0
        self._progress = 0.0  # tokens that a request running since the beginning would have
        self._context = 0.0  # tokens that a step reads
        self._may_generate = 0.0  # sum over running of limit - generated + entered
        self._ratio = RATIO_START
        self._job: Job | None = None
        self._prefilling: list[Request] = []
        self._waking = False
        self._stride = 0  # steps of the current decode stretch; 0: prefill or idle

    # ---- from outside

    def submit(self, request: Request) -> None:
        self._arrivals += 1
        request.number = self._arrivals
        heapq.heappush(self._waiting, (-request.priority, request.number, request))
        self._interrupt()

    def abort(self, request: Request) -> None:
        """It ends at the next step with what it has."""
        if request.ended:
            return
        if request.running or request in self._prefilling:
            self._aborts.append(request)
            self._interrupt(always=True)
        else:
            self._cut(request)

    def lose(self) -> list[Request]:
        """It dies: what ran or waited, with what it had generated; none of it ends here."""
        if self._job is not None:
            self.host.cancel(self._job)
            self._job = None
        ran = list(self._running)
        for request in ran:
            request.generated = self._leave(request)
        lost = [*ran, *self._prefilling, *(request for _, _, request in sorted(self._waiting, key=lambda w: w[:2]))]
        lost = [request for request in lost if not request.ended]
        self._prefilling, self._waiting, self._ends, self._aborts = [], [], [], []
        self.cache = PrefixCache(self.costs.kv_tokens)
        for request in lost:
            request.ended = True
        return lost

    def flush(self) -> None:
        self.cache.clear()

    @property
    def running(self) -> int:
        return len(self._running)

    # ---- steps

    def _interrupt(self, always: bool = False) -> None:
        """Something changed: end the current stretch at the next step's end, if that matters; begin if idle."""
        if self._job is None:
            if not self._waking:  # after all that arrives at this very moment
                self._waking = True
                self.kernel.after(0.0, self._wake)
        elif self._stride > 1 and (always or self._may_enter()):
            done = self.host.worked_s(self._job)
            steps = self._steps_within(done)
            if steps < self._stride:
                self._stride = steps
                self.host.change(self._job, self._stretch_s(steps))

    def _wake(self) -> None:
        self._waking = False
        if self._job is None:
            self._next()

    def _next(self) -> None:
        """Plan from here to the next change."""
        self._take_aborted()
        self._prefilling = self._enter()
        if self._prefilling:
            fresh = sum(r.prompt_tokens + math.ceil(r.generated) - r.cached_tokens for r in self._prefilling)
            self._stride = 0
            self._job = self.host.start(self.costs.prefill_s(fresh) * self.slowdown, self.cores, self._prefilled, self.weight)
            return
        if not self._running:
            self._job = None
            return
        while self.cache.free < self._growth():
            if len(self._running) == 1:
                break  # nothing to retract: it alone is larger than the cache
            self._retract()
        self._stride = self._until_change()
        seconds = self._stretch_s(self._stride)
        cores = self.cores + self.token_core_s * self._growth() * self._stride / seconds
        self._job = self.host.start(seconds, cores, self._decoded, self.weight)

    def _growth(self) -> float:
        return len(self._running) * self._accepted()

    def _accepted(self) -> float:
        s = self.speculation
        return s.accepted_tokens if s is not None and len(self._running) <= s.max_running else 1.0

    def _until_change(self) -> int:
        while self._ends[0][2].ended or not self._ends[0][2].running or self._ends[0][0] != self._end_of(self._ends[0][2]):
            heapq.heappop(self._ends)
        steps = math.ceil((self._ends[0][0] - self._progress - EPSILON) / self._accepted())
        return max(1, min(steps, int(self.cache.free // self._growth()) or 1))

    def _stretch_s(self, steps: int) -> float:
        """The next `steps` decode steps; the context grows by one token a request and step."""
        accepted = self._accepted()
        context = self._context + len(self._running) * accepted * (steps - 1) / 2
        cost = self.speculation.step_cost if self.speculation is not None and accepted > 1 else 1.0
        return steps * self.costs.decode_s(len(self._running), context) * cost * self.slowdown

    def _steps_within(self, worked_s: float) -> int:
        """The step that runs after `worked_s` of the stretch, counted from 1."""
        low, high = 1, self._stride
        while low < high:
            middle = (low + high) // 2
            if self._stretch_s(middle) > worked_s - 1e-12:
                high = middle
            else:
                low = middle + 1
        return low

    def _decoded(self) -> None:
        accepted, steps = self._accepted(), self._stride
        grown = len(self._running) * accepted * steps
        self.steps += steps
        self._progress += accepted * steps
        self._context += grown
        self.cache.take(grown)
        self._ratio = max(RATIO_LEAST, self._ratio - steps * (RATIO_START - RATIO_LEAST) / RATIO_STEPS)
        while self._ends and self._ends[0][0] <= self._progress + EPSILON:
            end, _, request = heapq.heappop(self._ends)
            if request.running and end == self._end_of(request):
                self._end(request, "length" if request.output_tokens >= request.limit_tokens else "stop")
        self._next()

    # ---- requests in and out

    def _may_enter(self) -> bool:
        return bool(self._waiting) and len(self._running) < self.max_running and self._fits(self._waiting[0][2])

    def _fits(self, request: Request, entering: float = 0.0) -> bool:
        """`entering`: tokens that the ones entering with it will take."""
        shared = self.cache.in_use(("prompt", request.trajectory.group))
        needs = request.prompt_tokens - shared + math.ceil(request.generated) + 1
        ahead = min(request.limit_tokens - request.generated, CLIP_TOKENS)
        promised = self._ratio * min(self._may_generate - len(self._running) * self._progress, len(self._running) * CLIP_TOKENS)
        alone = not self._running and not entering
        return alone or needs + ahead + promised + entering <= self.cache.free

    def _enter(self) -> list[Request]:
        chosen: list[Request] = []
        tokens = entering = 0.0
        while self._waiting and len(self._running) + len(chosen) < self.max_running:
            request = self._waiting[0][2]
            if request.ended:
                heapq.heappop(self._waiting)
                continue
            if not self._fits(request, entering) or (chosen and tokens >= self.prefill_batch_tokens):
                break
            heapq.heappop(self._waiting)
            held = self.cache.held(("prompt", request.trajectory.group)) + self.cache.held(request.trajectory)
            whole = request.prompt_tokens + math.ceil(request.generated)
            request.cached_tokens = max(0, min(held, whole - 1))
            tokens += whole - request.cached_tokens
            entering += whole + min(request.limit_tokens - request.generated, CLIP_TOKENS)
            chosen.append(request)
        return chosen

    def _prefilled(self) -> None:
        """Each has its first token; the prompt is shared from here on."""
        entered, self._prefilling = self._prefilling, []
        for request in entered:
            request.running = True
            request.entered = self._progress
            self._running[request] = None
            self.cache.drop(request.trajectory)
            self.cache.lock(("prompt", request.trajectory.group), request.prompt_tokens)
            request.generated = min(request.generated + 1.0, float(request.output_tokens))
            self.cache.take(request.generated)
            self._context += request.prompt_tokens + request.generated
            self._may_generate += request.limit_tokens - request.generated + request.entered
            heapq.heappush(self._ends, (self._end_of(request), request.number, request))
        for request in entered:
            if not request.started:
                request.started = True
                request.first(request)
            if request.output_tokens <= request.generated:
                self._end(request, "length" if request.output_tokens >= request.limit_tokens else "stop")
        self._next()

    def _end_of(self, request: Request) -> float:
        return request.entered + request.output_tokens - request.generated

    def _leave(self, request: Request) -> int:
        """Out of the batch; returns the tokens that it has generated."""
        del self._running[request]
        grown = self._progress - request.entered
        has = request.generated + grown
        self._context -= request.prompt_tokens + has
        self._may_generate -= request.limit_tokens - request.generated + request.entered
        self.cache.give(has)
        self.cache.unlock(("prompt", request.trajectory.group))
        request.running = False
        return min(math.floor(has + EPSILON), request.output_tokens)

    def _end(self, request: Request, why: str) -> None:
        request.generated = self._leave(request)
        request.ended = True
        self.cache.keep(request.trajectory, int(request.generated))
        request.finish(request, why)

    def _take_aborted(self) -> None:
        for request in self._aborts:
            if request.running:
                self._end(request, "abort")
            elif not request.ended:  # retracted meanwhile
                self._cut(request)
        self._aborts.clear()

    def _cut(self, request: Request) -> None:
        """While it waits."""
        request.ended = True
        request.finish(request, "abort")

    def _retract(self) -> None:
        """As SGLang: who has generated least waits again."""
        request = min(self._running, key=lambda r: (r.generated + self._progress - r.entered, -r.number))
        self.retractions += 1
        request.generated = self._leave(request)
        running = len(self._running)
        generated = sum(r.generated + self._progress - r.entered for r in self._running)
        self._ratio = min(1.0, (generated + 20 * running) / max(sum(r.limit_tokens for r in self._running), 1))
        heapq.heappush(self._waiting, (-request.priority, request.number, request))

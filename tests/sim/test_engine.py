"""The engine that jumps from change to change ends every request when one that takes every single step would."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpipe.config_simulation import MeasuredEngine, Speculation
from rpipe.core.types import TrajectoryId
from rpipe.sim.costs import Measured
from rpipe.sim.engine import Request, SimulatedEngine
from rpipe.sim.kernel import Host, Kernel

COSTS = MeasuredEngine(
    decode_step_s=[(1, 0.01), (4, 0.02), (8, 0.024)], context_token_s=1e-5, prefill_s=0.03, prefill_token_s=1e-3
)
PROMPT = 7


@dataclass
class Seen:
    first_t: dict[TrajectoryId, float] = field(default_factory=dict)
    end_t: dict[TrajectoryId, float] = field(default_factory=dict)
    why: dict[TrajectoryId, str] = field(default_factory=dict)
    tokens: dict[TrajectoryId, int] = field(default_factory=dict)


class Bench:
    def __init__(self, kv_tokens: int = 100_000, max_running: int = 4, speculation: Speculation | None = None) -> None:
        self.kernel, self.seen = Kernel(), Seen()
        costs = Measured(COSTS, kv_tokens)
        self.engine = SimulatedEngine(self.kernel, Host(self.kernel), costs, max_running, speculation=speculation)
        self.requests: dict[TrajectoryId, Request] = {}

    def submit(self, t: float, group: int, output: int, priority: int = 0, limit: int = 1000) -> Request:
        trajectory = TrajectoryId(group, 0)
        request = Request(trajectory, PROMPT, output, limit, priority, self._first, self._end)
        self.requests[trajectory] = request
        self.kernel.at(t, lambda: self.engine.submit(request))
        return request

    def _first(self, request: Request) -> None:
        self.seen.first_t[request.trajectory] = self.kernel.now

    def _end(self, request: Request, why: str) -> None:
        self.seen.end_t[request.trajectory] = self.kernel.now
        self.seen.why[request.trajectory] = why
        self.seen.tokens[request.trajectory] = int(request.generated)

    def run(self) -> Seen:
        self.kernel.run()
        return self.seen


def one_by_one(arrivals: list[tuple[float, int, int]], max_running: int) -> Seen:
    """(t, output tokens, priority) by group number; every step of its own."""
    seen, now = Seen(), 0.0
    waiting = [(t, group, output, priority) for group, (t, output, priority) in enumerate(arrivals)]
    running: dict[int, list[int]] = {}  # group -> [generated, output]
    costs = Measured(COSTS, 0)
    while waiting or running:
        here = sorted((w for w in waiting if w[0] <= now + 1e-9), key=lambda w: (-w[3], w[0], w[1]))
        entering = here[: max_running - len(running)]
        if entering:
            now += costs.prefill_s(PROMPT * len(entering))
            for request in entering:
                waiting.remove(request)
                running[request[1]] = [1, request[2]]
                seen.first_t[TrajectoryId(request[1], 0)] = now
        elif running:
            now += costs.decode_s(len(running), sum(PROMPT + g for g, _ in running.values()))
            for at in running.values():
                at[0] += 1
        else:
            now = min(w[0] for w in waiting)
        for group, (generated, output) in list(running.items()):
            if generated >= output:
                seen.end_t[TrajectoryId(group, 0)] = now
                del running[group]
    return seen


ARRIVAL = st.tuples(st.integers(0, 2000).map(lambda n: n / 997), st.integers(1, 60), st.integers(-3, 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(ARRIVAL, min_size=1, max_size=14), st.integers(1, 6))
def test_jumping_ends_requests_when_stepping_would(arrivals, max_running):
    bench = Bench(max_running=max_running)
    for group, (t, output, priority) in enumerate(arrivals):
        bench.submit(t, group, output, priority)
    seen, wanted = bench.run(), one_by_one(arrivals, max_running)
    assert seen.end_t == pytest.approx(wanted.end_t, abs=1e-6)
    assert seen.first_t == pytest.approx(wanted.first_t, abs=1e-6)


def test_the_highest_priority_enters_first():
    bench = Bench(max_running=1)
    bench.submit(0.0, 0, 5, 0)
    bench.submit(0.001, 1, 5, -9)
    bench.submit(0.002, 2, 5, -1)
    seen = bench.run()
    assert seen.end_t[TrajectoryId(2, 0)] < seen.end_t[TrajectoryId(1, 0)]


def test_an_abort_ends_at_the_next_step_with_what_there_is():
    bench = Bench()
    request = bench.submit(0.0, 0, 500)
    bench.kernel.at(1.0, lambda: bench.engine.abort(request))
    seen = bench.run()
    assert seen.why[request.trajectory] == "abort"
    assert 1.0 <= seen.end_t[request.trajectory] < 1.02
    assert 80 < seen.tokens[request.trajectory] < 100


def test_an_abort_while_it_waits_ends_it_at_once():
    bench = Bench(max_running=1)
    bench.submit(0.0, 0, 500)
    waits = bench.submit(0.1, 1, 500)
    bench.kernel.at(0.5, lambda: bench.engine.abort(waits))
    seen = bench.run()
    assert (seen.end_t[waits.trajectory], seen.tokens[waits.trajectory]) == (0.5, 0)
    assert seen.why[TrajectoryId(0, 0)] == "stop"


def test_a_full_cache_retracts_and_nothing_is_lost():
    bench = Bench(kv_tokens=300, max_running=8)
    for group in range(8):
        bench.submit(0.0, group, 100, limit=100)
    seen = bench.run()
    assert bench.engine.retractions > 0
    assert len(seen.end_t) == 8 and set(seen.tokens.values()) == {100}
    assert bench.engine.cache.locked == pytest.approx(0.0, abs=1e-6)


def test_an_ample_cache_retracts_nothing():
    bench = Bench(kv_tokens=3000, max_running=8)
    for group in range(8):
        bench.submit(0.0, group, 100, limit=100)
    bench.run()
    assert bench.engine.retractions == 0


def test_siblings_after_the_first_find_the_prompt_until_it_is_flushed():
    bench = Bench(max_running=1)
    requests = []
    for sample in range(3):
        request = Request(TrajectoryId(0, sample), 50, 4, 100, 0, bench._first, bench._end)
        requests.append(request)
        bench.kernel.at(sample * 1.0, lambda r=request: bench.engine.submit(r))
    bench.kernel.at(1.9, bench.engine.flush)
    bench.run()
    assert [r.cached_tokens for r in requests] == [0, 49, 0]


def test_speculation_commits_several_tokens_a_step_in_small_batches_only():
    drafts = Speculation(accepted_tokens=2.5, step_cost=1.0, max_running=2)
    plain, drafted = Bench(max_running=4), Bench(max_running=4, speculation=drafts)
    for bench in (plain, drafted):
        bench.submit(0.0, 0, 101)
    assert plain.run().end_t[TrajectoryId(0, 0)] > 2.2 * drafted.run().end_t[TrajectoryId(0, 0)]
    assert drafted.engine.steps == 40
    crowded = Bench(max_running=4, speculation=drafts)
    for group in range(4):
        crowded.submit(0.0, group, 101)
    crowded.run()
    assert crowded.engine.steps == 100

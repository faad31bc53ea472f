"""Does a scripted engine keep the promises of the Engine protocol, in virtual time?"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from rpipe.config import parse
from rpipe.rollout.engine import Chunk, EngineError, Sampling, TensorSpec, TurnRequest
from rpipe.rollout.scripted_engine import ScriptedEngine
from rpipe.rollout.scripted_options import Script
from rpipe.rollout.sglang_server import free_port


class VirtualClock:
    """Sleeping moves it; everything else is free."""

    def __init__(self) -> None:
        self.t = 0.0

    def now(self) -> float:
        return self.t

    async def sleep(self, seconds: float) -> None:
        for _ in range(5):  # let whoever is ready go first
            await asyncio.sleep(0)
        self.t += seconds


def engine(clock: VirtualClock, lengths: dict[str, int], **options: object) -> ScriptedEngine:
    settings: dict[str, object] = {"tokens_per_s": lambda n: 10.0, "tick_s": 0.0, **options}
    return ScriptedEngine(lambda r: lengths[r.request_id], clock=clock.now, sleep=clock.sleep, **settings)  # type: ignore[arg-type]


def request(name: str, limit: int = 100, priority: int = 0, ignore_eos: bool = False) -> TurnRequest:
    return TurnRequest(name, (5, 6, 7), Sampling(max_new_tokens=limit, ignore_eos=ignore_eos), priority)


async def collect(e: ScriptedEngine, r: TurnRequest, ends: list[str] | None = None) -> list[Chunk]:
    chunks = [chunk async for chunk in e.generate(r)]
    if ends is not None:
        ends.append(r.request_id)
    return chunks


def ids(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(i for c in chunks for i in c.token_ids)


def run(work: Callable[[VirtualClock], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(VirtualClock()), 10))  # type: ignore[arg-type]


def test_a_response_has_its_scripted_length_and_ends_with_eos_or_at_the_limit():
    async def work(clock: VirtualClock) -> None:
        e = engine(clock, {"short": 7, "long": 50, "one": 1}, eos_id=1)
        await e.start()
        short = await collect(e, request("short", limit=20))
        long = await collect(e, request("long", limit=20))
        one = await collect(e, request("one", limit=20))
        assert (len(ids(short)), ids(short)[-1], short[-1].finish) == (7, 1, "stop")
        assert (len(ids(long)), long[-1].finish) == (20, "length") and 1 not in ids(long)
        assert (ids(one), one[-1].finish, len(one)) == ((1,), "stop", 1)
        assert len(ids(await collect(e, request("short", limit=20, ignore_eos=True)))) == 20
        assert all(len(c.token_ids) == len(c.logprobs) and all(p <= 0 for p in c.logprobs) for c in short + long)
        await e.stop()

    run(work)


def test_tokens_depend_on_request_and_seed_and_not_on_what_else_runs():
    async def work(clock: VirtualClock) -> None:
        lengths = {str(i): 5 + i for i in range(8)}
        busy, alone, other = engine(clock, lengths), engine(clock, lengths, max_running=1), engine(clock, lengths, seed=1)
        for e in (busy, alone, other):
            await e.start()
        together = await asyncio.gather(*(collect(busy, request(str(i))) for i in range(8)))
        again = [await collect(alone, request(str(i))) for i in range(8)]
        assert [ids(c) for c in together] == [ids(c) for c in again]
        assert [p for c in together[3] for p in c.logprobs] == [p for c in again[3] for p in c.logprobs]
        assert ids(await collect(other, request("7"))) != ids(together[7])
        for e in (busy, alone, other):
            await e.stop()

    run(work)


def test_time_follows_from_length_and_the_speed_at_the_batch_size():
    async def work(clock: VirtualClock) -> None:
        # 2 together at 5 tokens/s each until a is done (10 tokens: 2 s), then b alone at 10/s for its other 20: 2 s.
        e = engine(clock, {"a": 10, "b": 30}, tokens_per_s=lambda n: 10.0 / n)
        await e.start()
        done: dict[str, float] = {}

        async def timed(name: str) -> None:
            await collect(e, request(name))
            done[name] = clock.t

        await asyncio.gather(timed("a"), timed("b"))
        assert done["a"] == pytest.approx(2.0, abs=1e-6)
        assert done["b"] == pytest.approx(4.0, abs=1e-6)
        await e.stop()

    run(work)


def test_the_queue_goes_by_priority_then_arrival_and_the_running_limit_holds():
    async def work(clock: VirtualClock) -> None:
        e = engine(clock, dict.fromkeys("abcde", 10), max_running=1)
        await e.start()
        ends: list[str] = []
        first = asyncio.create_task(collect(e, request("a", priority=-9), ends))
        while not (await e.load()).running:
            await asyncio.sleep(0)
        later = (("b", -2), ("c", -1), ("d", -1), ("e", 0))
        rest = [asyncio.create_task(collect(e, request(n, priority=p), ends)) for n, p in later]
        await e.pause()  # so that all are queued before the limit decides
        for _ in range(5):
            await asyncio.sleep(0)
        load = await e.load()
        assert (load.running, load.queued) == (1, 4)
        await e.resume()
        await asyncio.gather(first, *rest)
        assert ends == ["a", "e", "c", "d", "b"]
        await e.stop()

    run(work)


def test_abort_keeps_a_prefix_and_a_queued_one_ends_empty():
    async def work(clock: VirtualClock) -> None:
        e = engine(clock, {"run": 90, "wait": 90}, max_running=1, stream_interval_tokens=4)
        await e.start()
        whole = ids(await collect(e, request("run")))
        got: list[Chunk] = []
        async for chunk in e.generate(request("run")):
            got.append(chunk)
            if len(ids(got)) >= 9 and chunk.finish is None:
                queued = asyncio.create_task(collect(e, request("wait")))
                await asyncio.sleep(0)
                await e.abort("wait")
                last = (await queued)[-1]
                assert (last.token_ids, last.finish) == ((), "abort")
                await e.abort("run")
        assert got[-1].finish == "abort" and 9 <= len(ids(got)) < 90
        assert ids(got) == whole[: len(ids(got))]
        await e.abort("nobody")
        assert (await e.load()).running == 0
        await e.stop()

    run(work)


def test_abandoning_the_iterator_frees_the_slot():
    async def work(clock: VirtualClock) -> None:
        e = engine(clock, {"a": 1000, "b": 5}, max_running=1)
        await e.start()
        stream = e.generate(request("a", limit=1000))
        await stream.__anext__()
        await stream.aclose()
        assert len(ids(await collect(e, request("b")))) == 5
        await e.stop()

    run(work)


def test_nothing_is_made_while_paused():
    async def work(clock: VirtualClock) -> None:
        e = engine(clock, {"a": 40}, stream_interval_tokens=10)
        await e.start()
        stream = e.generate(request("a"))
        await stream.__anext__()
        await e.pause()
        at = clock.t
        clock.t += 1000.0
        await e.resume()
        rest = [c async for c in stream]
        assert rest[-1].finish == "stop"
        assert clock.t - at - 1000.0 == pytest.approx(3.9, abs=0.11)
        await e.stop()

    run(work)


def test_chunks_say_the_version_that_made_them():
    async def work(clock: VirtualClock) -> None:
        e = engine(clock, {"a": 40}, stream_interval_tokens=10)
        await e.start()
        chunks = []
        async for chunk in e.generate(request("a")):
            chunks.append(chunk)
            if len(chunks) == 2:
                await e.begin_update()
                await e.receive_bucket([TensorSpec("w", "float32", (2, 3))])
                await e.end_update(7)
        assert [c.version for c in chunks[:2]] == [0, 0]
        assert chunks[-1].version == 7 and len(ids(chunks)) == 40
        assert (e.updates, e.weights.tensors) == (1, 1)
        await e.stop()

    run(work)


def test_a_dead_engine_fails_every_request_and_starts_again():
    async def work(clock: VirtualClock) -> None:
        e = engine(clock, {"a": 1000}, fail_after_s=3.0)
        await e.start()
        clock.t += 5.0
        assert await e.healthy(1.0), "its script begins with its first request, however long the job takes to come up"
        with pytest.raises(EngineError, match=r"engine 0 .*script"):
            await collect(e, request("a", limit=1000))
        assert clock.t == pytest.approx(8.0, abs=0.2) and not await e.healthy(1.0)
        with pytest.raises(EngineError):
            await collect(e, request("a"))
        await e.start()
        assert await e.healthy(1.0) and len(ids(await collect(e, request("a")))) == 100
        await e.stop()

    run(work)


def test_released_memory_must_be_taken_back_and_filled_before_the_next_request():
    async def work(clock: VirtualClock) -> None:
        e = engine(clock, {"a": 5})
        await e.start()
        await e.release_memory()
        with pytest.raises(EngineError, match="released"):
            await collect(e, request("a"))
        await e.resume_memory()
        with pytest.raises(EngineError, match="update of its weights"):
            await collect(e, request("a"))
        await e.end_update(1)
        assert len(ids(await collect(e, request("a")))) == 5
        await e.stop()

    run(work)


TRAINER = """
import os, sys, torch, torch.distributed as dist
from rpipe.runtime.side_group import leave, side_group
group = side_group("127.0.0.1", int(sys.argv[1]), 2, 0, "weights", timeout_s=90)
for tensor in (torch.arange(6.0).reshape(2, 3), torch.ones(5, dtype=torch.bfloat16)):
    dist.broadcast(tensor, src=0, group=group)
leave(group)
os._exit(0)  # the interpreter's end races with the store's and gloo's threads; the job ends so too (runtime/world.py)
"""


@pytest.mark.parametrize("default_world", ["none", "before"])
def test_it_joins_the_real_broadcast_beside_any_default_world(default_world):
    port, world = free_port(), {"init_method": f"tcp://127.0.0.1:{free_port()}", "world_size": 1, "rank": 0}
    if default_world == "before":
        dist.init_process_group("gloo", **world)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(port)], env=environment)

    async def work(clock: VirtualClock) -> None:
        e = engine(clock, {"a": 5}, collective_s=90.0)
        await e.start()
        for _ in range(600):  # a client that comes before the store backs off for seconds
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            await asyncio.sleep(0.1)
        await e.join_update_group("127.0.0.1", port, 2, "gloo", "weights")
        await e.receive_bucket([TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", (5,))])
        assert (e.weights.tensors, e.weights.nbytes) == (2, 6 * 4 + 5 * 2)
        await e.stop()

    try:
        asyncio.run(asyncio.wait_for(work(VirtualClock()), 120))
        assert trainer.wait(60) == 0
        if default_world == "none":  # and the default world can still be made
            dist.init_process_group("gloo", **world)
        assert dist.get_world_size() == 1
    finally:
        trainer.kill()
        trainer.wait()
        dist.destroy_process_group()


def config(**options: object):
    scripted = {"kind": "scripted", "options": options}
    return parse({"model": {"path": "m"}, "data": {"train": {"kind": "sums"}}, "engine": scripted}, "run.yaml")


def test_the_config_chooses_lengths_and_speed():
    script = Script.read({"median_tokens": 64, "sigma": 1.0, "tokens_per_s": 500, "engine_tokens_per_s": 1000})
    draws = sorted(script.lengths(0)(request(str(i))) for i in range(2001))
    assert 55 < draws[1000] < 75 and draws[-1] > 640 and draws[0] >= 1
    assert (script.speed(1), script.speed(2), script.speed(10)) == (500, 500, 100)
    assert {Script.read({"lengths": "constant", "median_tokens": 9}).lengths(0)(request(str(i))) for i in range(5)} == {9}

    async def work() -> None:
        e = ScriptedEngine.from_config(config(lengths="constant", median_tokens=40, tokens_per_s=4000.0), 0)
        await e.start()
        results = await asyncio.gather(*(collect(e, request(f"r{i}")) for i in range(64)))
        assert all(len(ids(c)) == 40 for c in results)
        await e.stop()

    asyncio.run(asyncio.wait_for(work(), 10))


def test_a_bad_option_is_named():
    for options, words in (
        ({"median": 3}, "median"),
        ({"lengths": "zipf"}, r"zipf.*lognormal, uniform or constant"),
        ({"tokens_per_s": 0}, "tokens_per_s = 0"),
    ):
        with pytest.raises(EngineError, match=words):
            ScriptedEngine.from_config(config(**options), 0)

"""Is what SGLang's server says about a request read right, also when it says it badly or not at all?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from rpipe.config import parse
from rpipe.rollout.engine import Chunk, EngineError, EngineGone, Sampling, TurnRequest
from rpipe.rollout.sglang_engine import SglangEngine
from rpipe.rollout.sglang_launch import command_line, server_arguments
from rpipe.rollout.sglang_server import free_port, last_word
from rpipe.rollout.sglang_stream import Assembler, EventSplitter, ServerEvent


def event(ids: list[int], total: int, version: int = 0, finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"weight_version": str(version), "completion_tokens": total, "finish_reason": finish}
    said["cached_tokens"] = 3
    said["output_token_logprobs"] = [[-i / 8, i, None] for i in ids]
    return {"output_ids": ids, "meta_info": {**said, **meta}}


def parsed(value: dict[str, Any]) -> ServerEvent:
    return msgspec.convert(value, ServerEvent)


def feed(assembler: Assembler, *events: dict[str, Any]) -> list[Chunk]:
    return [chunk for e in events for chunk in assembler.feed(parsed(e))]


def test_events_are_found_wherever_the_network_cuts_them():
    sent = [event([5, 6], 2), event([7], 3, finish={"type": "stop", "matched": 7})]
    data = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in sent) + b"data: [DONE]\n\n"
    for size in (1, 7, 64, len(data)):
        splitter, found = EventSplitter(), []
        for i in range(0, len(data), size):
            found += splitter.feed(data[i : i + size])
        assert [e.output_ids for e in found] == [[5, 6], [7]]


def test_new_tokens_come_as_they_are_said():
    chunks = feed(Assembler(0), event([5, 6], 2), event([7], 3), event([1], 4, finish={"type": "stop", "matched": 1}))
    assert [c.token_ids for c in chunks] == [(5, 6), (7,), (1,)]
    assert chunks[0].logprobs == (-5 / 8, -6 / 8) and [c.finish for c in chunks] == [None, None, "stop"]
    assert chunks[-1].cached_tokens == 3


def test_an_abort_in_the_queue_repeats_the_last_id_and_every_logprob_and_adds_nothing():
    abort = {"type": "abort", "message": "Abort in waiting queue"}
    said = {"finish_reason": abort, "weight_version": "0", "completion_tokens": 3}
    said["output_token_logprobs"] = [[-5 / 8, 5, None], [-6 / 8, 6, None], [-7 / 8, 7, None]]
    chunks = feed(Assembler(0), event([5, 6, 7], 3), {"output_ids": [7], "meta_info": said})
    assert [(c.token_ids, c.finish) for c in chunks] == [((5, 6, 7), None), ((), "abort")]
    # the same two events, merged by the server because the first still waited
    merged = {**said, "output_token_logprobs": [*said["output_token_logprobs"], *said["output_token_logprobs"]]}
    chunks = feed(Assembler(0), {"output_ids": [5, 6, 7, 7], "meta_info": merged})
    assert [(c.token_ids, c.logprobs, c.finish) for c in chunks] == [((5, 6, 7), (-5 / 8, -6 / 8, -7 / 8), "abort")]


def test_tokens_of_two_versions_are_told_apart_by_the_spans_of_the_last_event():
    spans = [{"version": "3", "start": 0, "end": 3}, {"version": "4", "start": 3, "end": 5}]
    chunks = feed(
        Assembler(3),
        event([5, 6], 2, version=3),
        event([7, 8], 4, version=4),  # 7 was sampled under 3; who speaks is 4
        event([9], 5, version=4, finish={"type": "length"}, weight_versions=spans),
    )
    assert [(c.token_ids, c.version, c.finish) for c in chunks] == [((5, 6), 3, None), ((7,), 3, None), ((8, 9), 4, "length")]


def test_what_is_wrong_is_said_and_not_trained_on():
    nan = {**event([5], 1)["meta_info"], "output_token_logprobs": [[None, 5, None]]}
    for bad, words in (
        (event([5], 1, finish={"type": "stop", "matched": "NaN happened"}), "NaN"),
        (event([], 0, finish={"type": "abort", "message": "queue is full", "status_code": 503}), "queue is full"),
        ({"error": {"message": "too long"}}, "too long"),
        (event([5], 3), "0 had come"),
        ({"output_ids": [5], "meta_info": nan}, "not a number"),
    ):
        with pytest.raises(EngineError, match=words):
            feed(Assembler(0), bad)


def test_the_command_line_follows_the_kinds_of_values():
    line = command_line("py", {"a_b": 1, "flag": True, "off": False, "none": None, "many": [1, 2], "map": {"k": 1}})
    assert line == ["py", "-m", "sglang.launch_server", "--a-b", "1", "--flag", "--many", "1", "2", "--map", '{"k": 1}']


def config(**engine: Any):
    return parse({"model": {"path": "m"}, "data": {"train": {"kind": "sums"}}, "engine": engine}, "t")


def test_options_replace_defaults_and_the_connection_is_not_theirs(tmp_path: Path):
    assert server_arguments(config(options={"stream-interval": 3}), 0, tmp_path)["stream_interval"] == 3
    assert server_arguments(config(kv_tokens=77), 0, tmp_path)["max_total_tokens"] == 77
    with pytest.raises(EngineError, match=r"engine\.options\.tp-size"):
        server_arguments(config(options={"tp-size": 2}), 0, tmp_path)


def test_the_log_s_last_word_is_its_last_error():
    assert last_word(["ValueError: early", "RuntimeError: the cause", "  at line 3", "Killed"]) == "RuntimeError: the cause"
    assert last_word(["hello", "", "  bye  "]) == "bye"
    assert last_word([]) == "its log is empty"


# ---- a server that behaves badly ------------------------------------------------------------------------------------


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def with_server(generate: Handler, tmp_path: Path, work: Any, **engine: Any) -> Any:
    """Run `work(engine, aborts)` against a server in this process; there is no child."""
    aborts: list[str] = []

    async def abort(request: web.Request) -> web.Response:
        aborts.append((await request.json())["rid"])
        return web.Response()

    async def ok(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.post("/abort_request", abort), web.get("/health", ok)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    e = SglangEngine(config(**engine), 0, tmp_path, tmp_path)
    e.server.death = lambda: None  # type: ignore[method-assign]
    e.server.launch = lambda: setattr(e.server, "url", f"http://127.0.0.1:{port}")  # type: ignore[method-assign]
    try:
        await e.start()
        return await asyncio.wait_for(work(e, aborts), 20)
    finally:
        await e.stop()
        await runner.cleanup()


async def stream(
    request: web.Request, events: list[dict[str, Any]], then_s: float = 0.0, done: bool = True
) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for e in events:
        await response.write(b"data: " + json.dumps(e).encode() + b"\n\n")
    await asyncio.sleep(then_s)
    if done:
        await response.write(b"data: [DONE]\n\n")
    return response


async def collect(e: SglangEngine, name: str = "r") -> list[Chunk]:
    return [c async for c in e.generate(TurnRequest(name, [5], Sampling(max_new_tokens=9)))]


def test_a_lost_connection_and_an_early_end_are_engine_errors(tmp_path: Path):
    async def generate(request: web.Request) -> web.StreamResponse:
        name = (await request.json())["rid"]
        if name.endswith("cut"):
            assert request.transport is not None
            request.transport.abort()
        if name.endswith("refused"):
            return web.json_response({"error": {"message": "bad sampling"}}, status=400)
        return await stream(request, [event([5], 1)], done=False)

    async def work(e: SglangEngine, aborts: list[str]) -> None:
        wanted = {"cut": "connection lost", "early": "closed the stream", "refused": r"refused \(400\): bad sampling"}
        for name, words in wanted.items():
            with pytest.raises(EngineError, match=words):
                await collect(e, name)

    asyncio.run(with_server(generate, tmp_path, work))


def test_a_stream_is_read_to_its_end_so_that_its_connection_serves_again(tmp_path: Path):
    ports: list[int] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        response = await stream(request, [event([5], 1, finish={"type": "stop", "matched": 5})])
        await asyncio.sleep(0.05)  # the body's end is a packet of its own, as SGLang's is
        return response

    async def work(e: SglangEngine, aborts: list[str]) -> None:
        for name in ("first", "second", "third"):
            await collect(e, name)
            while e._chores:  # it reads the rest
                await asyncio.sleep(0.01)

    asyncio.run(with_server(generate, tmp_path, work))
    assert len(ports) == 3 and len(set(ports)) == 1


def test_a_refusal_by_a_server_that_is_about_to_end_is_the_engines_loss(tmp_path: Path):
    """It can be started again; a refusal by one that goes on is the request's fault and ends the run."""

    async def generate(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no scheduler"}}, status=500)

    async def work(e: SglangEngine, aborts: list[str]) -> None:
        with pytest.raises(EngineError, match=r"refused \(500\): no scheduler") as told:
            await collect(e, "r")
        assert not isinstance(told.value, EngineGone)
        looks: list[int] = []

        def dies() -> str | None:
            looks.append(1)
            return "engine 0: SGLang's server ended" if len(looks) > 1 else None

        e.server.death = dies  # type: ignore[method-assign]
        with pytest.raises(EngineGone, match="SGLang's server ended"):
            await collect(e, "r")

    asyncio.run(with_server(generate, tmp_path, work))


def test_an_abort_that_the_server_never_hears_still_ends_the_stream_with_its_prefix(tmp_path: Path):
    async def generate(request: web.Request) -> web.StreamResponse:
        return await stream(request, [event([5, 6], 2)], then_s=30)

    async def work(e: SglangEngine, aborts: list[str]) -> None:
        generated = e.generate(TurnRequest("a", [5], Sampling(max_new_tokens=9)))
        chunks = [await generated.__anext__()]
        await e.abort("a")
        chunks += [c async for c in generated]
        assert [(c.token_ids, c.finish) for c in chunks] == [((5, 6), None), ((), "abort")]
        assert len(aborts) > 1 and all(a.endswith(":a") for a in aborts)

    asyncio.run(with_server(generate, tmp_path, work))


def test_abandoning_the_iterator_tells_the_server(tmp_path: Path):
    async def generate(request: web.Request) -> web.StreamResponse:
        return await stream(request, [event([5, 6], 2)], then_s=30)

    async def work(e: SglangEngine, aborts: list[str]) -> None:
        async for _ in e.generate(TurnRequest("x", [5], Sampling(max_new_tokens=9))):
            break
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if aborts:
                break
        assert [a.partition(":")[2] for a in aborts] == ["x"]

    asyncio.run(with_server(generate, tmp_path, work))

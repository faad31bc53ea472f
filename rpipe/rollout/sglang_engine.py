"""How does a rank use SGLang? As a server in a child process, over HTTP on loopback; sglang is never imported here.

Waits for                        unblocked by
  the server to be up            /health, or the child's end, or engine.start_deadline_s
  the next tokens of a request   the server; the monitor when the child ends (its silence is for the owner to notice)
  an answer to a command         the server, or the bound of that command

Response ids include the end-of-sequence (or stop) token that ended them, with its log-prob: the trainer trains it. With
`ignore_eos` neither EOS nor stop ids end a response. `Sampling.seed` counts only under engine.options
`enable_deterministic_inference: true`, which SGLang has for CUDA alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from rpipe.config import Config
from rpipe.core.types import Version
from rpipe.rollout.engine import Chunk, EngineError, EngineGone, EngineLoad, TensorSpec, TurnRequest
from rpipe.rollout.sglang_http import LOOK_S, Connection, encode, refusal
from rpipe.rollout.sglang_launch import server_arguments, server_environment
from rpipe.rollout.sglang_server import SglangServer
from rpipe.rollout.sglang_stream import Assembler, EventSplitter

LAUNCHES = 3  # of a start whose port another process took
ABORT_AGAIN_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
FLUSH_S = 10.0  # for the last request's leftovers to go


class _Stream:
    """One running request."""

    def __init__(self, rid: str, version: Version) -> None:
        self.rid = rid
        self.assembler = Assembler(version)
        self.chunks: asyncio.Queue[Chunk | EngineError] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.pump: asyncio.Task[None] | None = None

    def put(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self.chunks.put_nowait(chunk)
        if self.assembler.finished:
            self.ended.set()

    def fail(self, error: EngineError) -> None:
        if not self.ended.is_set():
            self.chunks.put_nowait(error)
            self.ended.set()


class SglangEngine:
    """An `Engine`. All calls from one event loop, in a thread that lives as long as the engine (see runtime.child)."""

    def __init__(
        self,
        config: Config,
        index: int,
        model_dir: Path,
        log_dir: Path,
        devices: tuple[int, ...] | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.config = config
        self.index = index
        self.model_dir = model_dir
        self.name = f"engine {index}"
        self.address = address  # of this host, as peers of the update group reach it
        self.server = SglangServer(
            self.name,
            config.engine.python or sys.executable,
            server_arguments(config, index, model_dir),
            server_environment(config, devices, os.environ.get("PYTHONPATH", "")),
            Path(log_dir) / f"engine{index:03d}.log",
        )
        self.version: Version = 0
        self._connection: Connection | None = None
        self._monitor: asyncio.Task[None] | None = None
        self._streams: dict[str, _Stream] = {}
        self._chores: set[asyncio.Task[Any]] = set()
        self._serial = 0
        self._life = 0
        self._paused = False
        self._update_group = ""

    @property
    def log_path(self) -> str:
        return str(self.server.log_path)

    @property
    def _http(self) -> Connection:
        if self._connection is None:
            raise EngineGone(self.server.death() or f"{self.name}: not started")
        return self._connection

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self, folder: Path | None = None, version: Version = 0) -> None:
        self.server.arguments = server_arguments(self.config, self.index, folder or self.model_dir, version, self._life)
        self._life += 1
        for attempt in range(LAUNCHES):
            await self._drop()
            self.server.launch()
            try:
                await self._come_up()
                break
            except EngineError:
                retry = attempt + 1 < LAUNCHES and self.server.port_was_taken()
                await self.stop()
                if not retry:
                    raise
            except BaseException:
                await self.stop()
                raise
        self.version, self._paused, self._update_group = version, False, ""
        self._monitor = asyncio.create_task(self._watch(), name=f"{self.name} monitor")

    async def _come_up(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.engine.start_deadline_s
        connection = self._connection = Connection(self.server)
        while True:
            death = self.server.unbound() or self.server.death()
            if death:
                raise EngineGone(death)
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
                if await connection.is_up():
                    return
            if loop.time() > deadline:
                raise EngineGone(
                    f"{self.name}: not up {self.config.engine.start_deadline_s:g} s after its start"
                    f" (engine.start_deadline_s); see {self.log_path}"
                )
            await asyncio.sleep(0.1)

    async def _watch(self) -> None:
        """Every wait of every request ends with the server."""
        while (death := self.server.death()) is None:
            await asyncio.sleep(LOOK_S)
        self._fail_all(death)

    def _fail_all(self, reason: str) -> None:
        for stream in list(self._streams.values()):
            stream.fail(EngineGone(reason))

    def death(self) -> str | None:
        return self.server.death()

    async def stop(self) -> None:
        self._fail_all(f"{self.name}: stopped")
        with contextlib.suppress(Exception):
            await self._drop()
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self.server.stop)

    async def _drop(self) -> None:
        """Let go of the connection and of everything that waits on it."""
        tasks = [*self._chores, *(s.pump for s in self._streams.values() if s.pump is not None)]
        if self._monitor is not None:
            tasks.append(self._monitor)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        self._chores.clear()
        self._streams.clear()
        self._monitor = None
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    # ---- generation -------------------------------------------------------------------------------------------------

    async def generate(self, request: TurnRequest) -> AsyncIterator[Chunk]:
        stream = self._open(request)
        try:
            while True:
                item = await stream.chunks.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.finish is not None:
                    return
        finally:
            self._close(request.request_id, stream)

    def _open(self, request: TurnRequest) -> _Stream:
        death = self.server.death()
        if death is not None:
            raise EngineGone(death)
        connection = self._http
        if request.request_id in self._streams:
            raise EngineError(f"{self.name}: request {request.request_id} is already running")
        # SGLang aborts every request whose id *begins* with the given one: a serial number of fixed width comes first.
        self._serial += 1
        stream = _Stream(f"{self._serial:010d}:{request.request_id}", self.version)
        self._streams[request.request_id] = stream
        stream.pump = asyncio.create_task(self._pump(connection, stream, encode(_body(stream.rid, request))))
        stream.pump.add_done_callback(self._chores.discard)
        return stream

    async def _pump(self, connection: Connection, stream: _Stream, body: bytes) -> None:
        """Move the server's events into the stream; any failure ends the stream."""
        splitter = EventSplitter()
        try:
            async with connection.session.post("/generate", data=body) as response:
                if response.status != 200:
                    raise EngineError(refusal(response.status, await response.read()))
                async for data in response.content.iter_any():  # to its very end: else the connection would not serve again
                    for event in splitter.feed(data):
                        if not stream.ended.is_set():
                            stream.put(stream.assembler.feed(event))
            if not stream.ended.is_set():
                raise ValueError("the server closed the stream before its end")
        except EngineError as error:
            await asyncio.sleep(2 * LOOK_S)  # a server may refuse because it is about to end: the engine is lost then
            death = self.server.death()
            told = f"{self.name}: {stream.rid.partition(':')[2]}: {error}; see {self.log_path}"
            stream.fail(EngineGone(death) if death is not None else EngineError(told))
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, msgspec.MsgspecError, ValueError) as error:
            stream.fail(EngineGone(await connection.lost(error)))

    def _close(self, request_id: str, stream: _Stream) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
        if stream.pump is None or stream.pump.done():
            return
        if stream.ended.is_set():
            self._chores.add(stream.pump)  # it reads the end of the stream, so that the connection serves again
            return
        stream.ended.set()
        stream.pump.cancel()
        if self._connection is not None:
            self._chore(self._connection.post("/abort_request", {"rid": stream.rid}))

    def _chore(self, work: Any) -> None:
        async def quietly() -> None:
            with contextlib.suppress(EngineError):
                await work

        task = asyncio.create_task(quietly())
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        for wait_s in ABORT_AGAIN_S:  # the server ignores the abort of a request that it has not taken in yet
            await self._http.post("/abort_request", {"rid": stream.rid})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stream.ended.wait(), wait_s)
            if stream.ended.is_set():
                return
        if stream.pump is not None:
            stream.pump.cancel()
        stream.put(stream.assembler.abandon())

    async def pause(self) -> None:
        """Running requests go back to the queue and keep their tokens; their KV cache is computed again on `resume`, so
        weights may change in between. (SGLang's "in_place" keeps the cache, and then refuses to flush it.) SGLang's
        scheduler spins while paused: it costs a core."""
        await self._http.post("/pause_generation", {"mode": "retract"})
        self._paused = True

    async def resume(self) -> None:
        await self._http.post("/continue_generation", {})
        self._paused = False

    async def flush_cache(self) -> None:
        # With a timeout SGLang waits until nothing is queued, without one it ignores what waits for the end of a pause.
        await self._http.post("/flush_cache" if self._paused else f"/flush_cache?timeout={FLUSH_S}", None)

    async def load(self) -> EngineLoad:
        answer = await self._http.call("GET", "/v1/loads?include=core", None)
        core = msgspec.json.decode(answer)["loads"]
        return EngineLoad(
            running=sum(c["num_running_reqs"] for c in core),
            queued=sum(c["num_waiting_reqs"] for c in core),
            kv_tokens_used=sum(c["num_used_tokens"] for c in core),
            kv_tokens_capacity=sum(c["max_total_num_tokens"] for c in core),
        )

    async def healthy(self, bound_s: float) -> bool:
        """Whether it generates a token now; while paused, whether the server answers."""
        if self.server.death() is not None:
            return False
        with contextlib.suppress(EngineError):
            await self._http.call("GET", "/health" if self._paused else "/health_generate", None, bound_s)
            return True
        return False

    # ---- weights ----------------------------------------------------------------------------------------------------

    async def join_update_group(self, address: str, port: int, world_size: int, backend: str, name: str) -> None:
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._http.post("/init_weights_update_group", body, self.config.limits.collective_s)
        self._update_group = name

    async def begin_update(self) -> None:
        await self._http.post("/begin_weight_update", {}, if_there=True)  # SGLang before 0.5.22 has no such session

    async def receive_bucket(self, tensors: Sequence[TensorSpec]) -> None:
        body = {
            "names": [t.name for t in tensors],
            "dtypes": [t.dtype for t in tensors],
            "shapes": [list(t.shape) for t in tensors],
            "group_name": self._update_group,
            "flush_cache": False,
        }
        await self._http.post("/update_weights_from_distributed", body, self.config.limits.collective_s)

    async def end_update(self, version: Version) -> None:
        await self._http.post("/end_weight_update", {}, if_there=True)
        await self._http.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        await self.flush_cache()
        self.version = version

    async def release_memory(self) -> None:
        self._wants_memory_saver()
        await self._http.post("/release_memory_occupation", {})

    async def resume_memory(self) -> None:
        self._wants_memory_saver()
        await self._http.post("/resume_memory_occupation", {})

    def _wants_memory_saver(self) -> None:
        """Without the saver SGLang says yes and keeps everything."""
        if self.server.arguments.get("enable_memory_saver") is not True:
            raise EngineError(
                f"{self.name}: SGLang gives memory back only with engine.options.enable_memory_saver = true"
                f" (torch_memory_saver, CUDA); here on {self.config.cluster.accelerator} it is not set"
            )


def _body(rid: str, request: TurnRequest) -> dict[str, Any]:
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        "no_stop_trim": True,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return {
        "rid": rid,
        "input_ids": np.asarray(request.token_ids).tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
        "priority": request.priority,
    }

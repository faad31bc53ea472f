"""How is a command said to the server, bounded, and what does a refusal or a lost connection mean?

Every failure is an EngineError: EngineGone with the child's last words where it died or was silent, else the server's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import msgspec

from rpipe.rollout.engine import EngineError, EngineGone
from rpipe.rollout.sglang_server import SglangServer

COMMAND_S = 60.0
LOOK_S = 0.1  # how often a wait looks at the child

encode = msgspec.json.Encoder().encode


class Connection:
    """The client's side of one server's life."""

    def __init__(self, server: SglangServer) -> None:
        self.server = server
        self.session = aiohttp.ClientSession(
            server.url,
            headers={"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def close(self) -> None:
        await self.session.close()

    async def is_up(self) -> bool:
        """Whether the server is healthy, and ours: /health answers anybody, and another engine may have the port."""
        within = aiohttp.ClientTimeout(total=5)
        async with self.session.get("/health", timeout=within) as response:
            if response.status != 200:
                return False
        async with self.session.get("/model_info", timeout=within) as response:
            return response.status != 401

    async def post(self, path: str, body: dict[str, Any] | None, bound_s: float = COMMAND_S, if_there: bool = False) -> None:
        """With `if_there`, a server that does not know the path is fine."""
        await self.call("POST", path, body, bound_s, if_there)

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None, bound_s: float = COMMAND_S, if_there: bool = False
    ) -> bytes:
        """The answer's body."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + bound_s
        exchange = asyncio.ensure_future(self._exchange(method, path, None if body is None else encode(body), if_there))
        try:
            while True:
                await asyncio.wait((exchange,), timeout=LOOK_S)
                if exchange.done():
                    return exchange.result()
                death = self.server.death()
                if death is not None:
                    raise EngineGone(death)
                if loop.time() > deadline:
                    raise EngineGone(
                        f"{self.server.name}: no answer to {path} within {bound_s:g} s; see {self.server.log_path}"
                    )
        except (aiohttp.ClientError, OSError) as error:
            raise EngineGone(f"{path}: {await self.lost(error)}") from None
        finally:
            exchange.cancel()

    async def _exchange(self, method: str, path: str, data: bytes | None, if_there: bool) -> bytes:
        async with self.session.request(method, path, data=data) as response:
            answer = await response.read()
            if response.status == 200 or (response.status == 404 and if_there):
                return answer
            name, log = self.server.name, self.server.log_path
            raise EngineError(f"{name}: {path}: {refusal(response.status, answer)}; see {log}")

    async def lost(self, error: Exception) -> str:
        """Why a connection went. A dying child loses its connections before it is gone; its own last words say more."""
        await asyncio.sleep(2 * LOOK_S)
        return self.server.death() or f"{self.server.name}: connection lost: {error!r}; see {self.server.log_path}"


def refusal(status: int, answer: bytes) -> str:
    """The server's own words, in whatever form it chose."""
    text = answer.decode(errors="replace").strip()
    with contextlib.suppress(msgspec.DecodeError):
        value = msgspec.json.decode(answer)
        while isinstance(value, dict) and value:
            value = next((value[k] for k in ("message", "error", "detail") if k in value), str(value))
        text = str(value)
    return f"refused ({status}): {text[:300]}"

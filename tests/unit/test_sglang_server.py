"""Where may the server of an engine leave its sockets, and for how long is it asked how it is?"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rpipe.config import parse
from rpipe.rollout.engine import EngineError
from rpipe.rollout.sglang_engine import SglangEngine
from rpipe.rollout.sglang_server import SglangServer


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SglangServer:
    """One that says which TMPDIR it was given; ours is too long for a socket's path."""
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho TMPDIR=$TMPDIR\n")
    program.chmod(0o755)
    return SglangServer("engine 0", str(program), {}, {}, tmp_path / "engine000.log")


def test_sockets_find_room_where_our_tmpdir_is_too_long_for_them(server: SglangServer) -> None:
    with pytest.raises(OSError, match="too long"), socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.join(tempfile.gettempdir(), "socket"))
    server.launch()
    try:
        end = time.monotonic() + 60
        while server.death() is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        told = server.log_path.read_text().partition("TMPDIR=")[2].strip()
        listener = Path(told, "pymp-12345678", "listener-12345678")  # as Python's multiprocessing names them
        listener.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(listener))
    finally:
        assert server.stop()
    assert not Path(told).exists()


def test_no_room_anywhere_is_one_line(server: SglangServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prefix: str, dir: str) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", f"{dir}/{prefix}")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    wanted = "^engine 0: no folder for sockets: /tmp: Permission denied; wanted: a TMPDIR of at most 59 characters$"
    with pytest.raises(EngineError, match=wanted):
        server.launch()


def test_its_health_is_waited_for_as_long_as_the_owner_says_and_the_server_gives_up_no_sooner(tmp_path: Path) -> None:
    tree = {"model": {"path": str(tmp_path)}, "data": {"train": {"kind": "sums"}}, "engine": {"stall_deadline_s": 299.5}}
    engine = SglangEngine(parse(tree, "test"), 0, tmp_path, tmp_path)
    asked: list[tuple[str, float]] = []

    async def call(method: str, path: str, body: Any, bound_s: float = 60.0) -> bytes:
        asked.append((path, bound_s))
        return b""

    engine.server.death = lambda: None  # type: ignore[method-assign]
    engine._connection = SimpleNamespace(call=call)  # type: ignore[assignment]
    assert asyncio.run(engine.healthy(225.0)) and asked == [("/health_generate", 225.0)]
    assert int(engine.server.env["SGLANG_HEALTH_CHECK_TIMEOUT"]) == 300

"""Is the SGLang server up, and if it is not, why?

The child process alone: its port, its key, its log, its end. What is said to it is `sglang_engine`'s.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rpipe.rollout.engine import EngineError
from rpipe.rollout.sglang_launch import command_line
from rpipe.runtime import child

HOST = "127.0.0.1"
POLITE_S = 0.0  # see SglangServer.stop
_ERROR_LINE = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
_NO_MODULE = re.compile(r"No module named '?([\w.]+)'?")
_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|port \d+ (is|was) (already )?(in use|taken|not available)", re.I)
_UNBOUND = re.compile(r"(\[Errno \d+\] )?error while attempting to bind on address .*", re.I)  # uvicorn's
_TAIL_BYTES = 1 << 16
_SOCKET_BYTES = 107  # the kernel's limit on a Unix socket's path
_OURS_BYTES = 48  # of it: rpipe-XXXXXXXX, and what the server and Python's multiprocessing put below that


class SglangServer:
    """One server process at a time; `launch` may be called again after `stop`."""

    def __init__(self, name: str, python: str, arguments: Mapping[str, Any], env: Mapping[str, str], log_path: Path) -> None:
        self.name = name  # "engine 0", for messages
        self.python = python
        self.arguments = dict(arguments)
        self.env = dict(env)
        self.log_path = log_path
        self.key = ""
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None  # the child's TMPDIR: SGLang leaves its sockets there
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def launch(self) -> None:
        """Start on a free port; returns at once. Raises EngineError where the interpreter is not there."""
        if shutil.which(self.python) is None:
            raise EngineError(f"{self.name}: engine.python = {self.python}: no such program")
        self._folder = self._make_folder()
        self.key = secrets.token_hex(16)
        secret = self._folder / "server.yaml"  # not on the command line, which every user of the machine can read
        secret.touch(mode=0o600)
        secret.write_text(f"api-key: '{self.key}'\n")
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        command = [
            *command_line(self.python, {"host": HOST, "port": port, **self.arguments}),
            "--config",
            str(secret),
        ]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            log.write(f"==== {datetime.now().isoformat(timespec='seconds')} {' '.join(command)}\n".encode())
            log.flush()
            self._log_start = log.tell()
            self._process = child.spawn(command, child.environment({**self.env, "TMPDIR": str(self._folder)}), log)

    def _make_folder(self) -> Path:
        """In our own TMPDIR, or in /tmp where that is so long that no socket finds room below it."""
        ours, most = tempfile.gettempdir(), _SOCKET_BYTES - _OURS_BYTES
        where = ours if len(os.fsencode(ours)) <= most else "/tmp"
        try:
            return Path(tempfile.mkdtemp(prefix="rpipe-", dir=where))
        except OSError as error:
            wanted = "room to write there" if where == ours else f"a TMPDIR of at most {most} characters"
            raise EngineError(f"{self.name}: no folder for sockets: {where}: {error.strerror}; wanted: {wanted}") from None

    def death(self) -> str | None:
        """None while it runs; afterwards one line that says why it ended, as far as its log knows."""
        if self._process is None:
            return f"{self.name}: not started"
        code = self._process.poll()
        if code is None:
            return None
        if unbound := self.unbound():
            return unbound
        lines = self._log_lines()
        missing = [m.group(1) for line in lines if (m := _NO_MODULE.search(line))]
        if missing and missing[-1].partition(".")[0] == "sglang":
            return f"{self.name}: {self.python} has no sglang ({last_word(lines)}); see {self.log_path}"
        return f"{self.name}: SGLang's server ended (exit code {code}): {last_word(lines)}; see {self.log_path}"

    def port_was_taken(self) -> bool:
        return any(_PORT_TAKEN.search(line) for line in self._log_lines())

    def unbound(self) -> str:
        """One line, where another process had taken the port; else "". It need not have ended by then: SGLang waits for its own
        warm-up, which asks that port for up to twelve minutes."""
        found = [match for line in self._log_lines() if (match := _UNBOUND.search(line))]
        return f"{self.name}: SGLang's server cannot listen: {found[-1].group()}; see {self.log_path}" if found else ""

    def _log_lines(self) -> list[str]:
        """The end of what this process wrote."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    def stop(self) -> bool:
        """End it and everything it started; False where something survived. Blocks for at most a few seconds.

        Killed without asking: asked by TERM, SGLang looks up only every 5 s, and it holds nothing that should be saved.
        """
        ended = True
        if self._process is not None:
            ended = child.end(self._process, POLITE_S)
            self._process = None
        if self._folder is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._folder)
            self._folder = None
        return ended


def free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return int(s.getsockname()[1])


def last_word(lines: list[str]) -> str:
    """The last line that names an error, else the last that is not empty."""
    stripped = [line.strip() for line in lines if line.strip()]
    errors = [line for line in stripped if _ERROR_LINE.match(line)]
    return (errors or stripped or ["its log is empty"])[-1][:300]

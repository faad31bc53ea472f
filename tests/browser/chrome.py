"""How does a test look into a page? A headless Chromium, spoken to over its DevTools socket; no driver, no download.

`Browser.start` -> `open` -> a Page: evaluate JavaScript, press keys, move and click the mouse, and what the page asked of the
network or complained about.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 90.0
ANSWER_S = 60.0
WIDTH, HEIGHT = 1360, 1000


def executable() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. Fails the waiting call where the browser answers with an error."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.requested: list[str] = []  # addresses
        self.complaints: list[str] = []  # exceptions, refused resources, console errors

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await asyncio.wait_for(self._socket.receive_json(), ANSWER_S)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._heard(message.get("method", ""), message.get("params", {}))

    def _heard(self, method: str, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"])[:600])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(told["args"])[:600])

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    async def go(self, path: Path, width: int = WIDTH, dark: bool = False) -> None:
        """Open a file and wait until the page says that it is drawn."""
        for domain in ("Network", "Runtime", "Log", "Page"):
            await self.send(f"{domain}.enable")
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await self.send("Page.navigate", url=path.resolve().as_uri())
        for _ in range(600):
            if await self.evaluate("document.documentElement?.dataset.ready") == "yes":
                return
            assert not self.complaints, self.complaints
            await asyncio.sleep(0.1)
        raise AssertionError(f"{path}: not drawn after 60 s; {self.complaints}")

    async def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def move(self, x: float, y: float) -> None:
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def click(self, x: float, y: float) -> None:
        await self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def picture(self, path: Path) -> None:
        """A PNG of the whole page, for people."""
        import base64

        shot = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


class Browser:
    """One process for a test session; ended by its own id."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self._process = process
        self.address = address

    @classmethod
    def start(cls, program: str, profile: Path) -> Browser:
        log = profile.with_suffix(".log")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += [
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "--no-first-run",
            "--disable-background-networking",
        ]
        env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        with log.open("wb") as file:
            process = subprocess.Popen([program, *options, "about:blank"], stdout=file, stderr=file, env=env)
        browser = cls(process, "")
        try:
            browser.address = browser._address(log)
        except BaseException:
            browser.close()
            raise
        return browser

    def _address(self, log: Path) -> str:
        """Where it listens, once it says so."""
        import time

        for _ in range(int(START_S * 10)):
            found = re.search(rb"DevTools listening on ws://([^/]+)/", log.read_bytes())
            if found:
                return found[1].decode()
            assert self._process.poll() is None, f"Chromium ended with {self._process.poll()}:\n{log.read_text()[-2000:]}"
            time.sleep(0.1)
        raise AssertionError(f"Chromium did not listen within {START_S:.0f} s:\n{log.read_text()[-2000:]}")

    async def open(self, session: aiohttp.ClientSession) -> Page:
        async with session.put(f"http://{self.address}/json/new?about:blank") as answer:
            target = await answer.json(content_type=None)
        return Page(await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 28))

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

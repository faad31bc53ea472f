from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.browser.chrome import Browser, Page, executable


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = executable()
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI=true, but there is no Chromium: .ci/run installs Debian's package `chromium`")
        pytest.skip("no Chromium here (Debian: apt-get install chromium): pages are not looked at")
    found = Browser.start(program, tmp_path_factory.mktemp("chromium") / "profile")
    yield found
    found.close()


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    async with aiohttp.ClientSession() as session:
        yield await browser.open(session)

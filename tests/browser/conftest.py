"""A server with the embedded model for all tests of this folder, a browser for each module, and a page for
each test. Playwright's synchronous interface holds an event loop while a browser is open: tests of a module
that opens one are plain functions. A run on all cores gives a process tests that follow one another, so
mostly one of them starts the server.

`pytest tests/browser -k docs` with BROWSER_SHOTS=/tmp/shots keeps the screenshots that tests take.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page

from tests.browser.chromium import Scheme, Size, Watch, browsing, watched

START_S = 120.0
STOP_S = 60.0

OpenPage = Callable[[Size, Scheme], Page]


@dataclass(frozen=True)
class Site:
    """A server, as a browser and a client see it."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def bugs(self) -> list[str]:
        """Unexpected errors in the server's log, each with its stack."""
        return ["Traceback" + part for part in self.log.read_text(errors="replace").split("Traceback")[1:]]


@contextmanager
def served(folder: Path, *options: str) -> Iterator[Site]:
    """A server of the embedded model with these options besides, until the block ends; its log is in the
    folder. Fails the test if the log has an unexpected error."""
    log = folder / "log.jsonl"
    command = [sys.executable, "-m", "runtime", "serve", "--port", "0", "--log-format", "json"]
    command += ["--num-threads", "1", "--standby-ranks", "0", *options]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, stdin=subprocess.DEVNULL)
    try:
        site = Site(_address(process, log), process, log)
        yield site
        assert site.bugs() == []
    finally:
        process.terminate()
        process.wait(STOP_S)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address of a server, when it is ready."""
    deadline, url = time.monotonic() + START_S, ""
    while not (url and httpx.get(f"{url}/health", timeout=START_S).status_code == 200):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.05)
        events = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        url = next((str(event["url"]) for event in events if "url" in event), "")
    return url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium. Skips without one, and fails under CI=true."""
    with browsing() as started:
        yield started


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server of the embedded model without keys. Tests leave it as it was; those that need other options
    start their own with `served`."""
    with served(tmp_path_factory.mktemp("server")) as site:
        yield site


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    """The watches of a test's pages, in the order in which they were opened. A problem fails the test."""
    opened: list[Watch] = []
    yield opened
    assert [problem for watch in opened for problem in watch.left()] == []


@pytest.fixture
def open_page(browser: Browser, watches: list[Watch]) -> Iterator[OpenPage]:
    """(size, colour scheme) -> an empty page, with storage of its own"""
    with ExitStack() as stack:

        def opened(size: Size, scheme: Scheme) -> Page:
            page, watch = stack.enter_context(watched(browser, size, scheme))
            watches.append(watch)
            return page

        yield opened


@pytest.fixture
def page(open_page: OpenPage) -> Page:
    """An empty page of a desktop's size, light."""
    return open_page("desktop", "light")


@pytest.fixture
def phone_page(open_page: OpenPage) -> Page:
    """An empty page 390 px wide, with touch, light."""
    return open_page("phone", "light")


@pytest.fixture
def dark_page(open_page: OpenPage) -> Page:
    """An empty page of a desktop's size, dark."""
    return open_page("desktop", "dark")

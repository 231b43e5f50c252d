"""Pages in a headless Chromium, each watched for what no page of this package may do: errors in the console,
violations of the content security policy, exceptions, and requests that leave this machine."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
INLINE_SCHEMES = ("data", "blob", "about")  # addresses that name no host
WAIT_MS = 60_000  # for elements to appear: a slow machine is slow at everything
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}  # CSS pixels

Size = Literal["desktop", "phone"]
Scheme = Literal["light", "dark"]

# elements that reach beyond the window, or whose text does, without a box around it that scrolls
_OVERFLOWING = """() => {
  const clips = ["auto", "scroll", "hidden", "clip"];
  const clipped = node => clips.includes(getComputedStyle(node).overflowX);
  const scrolls = node => node && (clipped(node) || scrolls(node.parentElement));
  const width = document.documentElement.clientWidth, end = node => {
    const box = node.getBoundingClientRect();
    return Math.max(box.right, node.clientWidth ? box.left + node.scrollWidth : 0);
  };
  const name = node => node.tagName.toLowerCase() + (node.id ? "#" + node.id : "");
  return [...document.body.querySelectorAll("*")]
    .filter(node => end(node) > width + 1 && !scrolls(node))
    .map(node => name(node) + ": " + node.textContent.slice(0, 60));
}"""


def find_chromium() -> str:
    """The path of Chromium. Skips the test where there is none, and fails it under CI=true."""
    found = next((path for name in NAMES if (path := shutil.which(name)) is not None), None)
    if found is None:
        words = "Chromium is not installed (Debian: apt install chromium)"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(words)
    return found


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser that finds no address beyond this machine. Skips or fails as `find_chromium` does."""
    executable = find_chromium()
    offline = "--host-resolver-rules=MAP * ~NOTFOUND , " + " , ".join(f"EXCLUDE {host}" for host in LOOPBACK)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable, args=[offline, "--disable-gpu", "--font-render-hinting=none"]
        )
        yield browser
        browser.close()


class Watch:
    """What a page did that it may not do. `allow` takes out what a test brings about itself."""

    def __init__(self, page: Page) -> None:
        self.problems: list[str] = []
        self._allowed: list[str] = []
        page.on("console", self._receive)
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("crash", lambda _: self.problems.append("the page crashed"))
        page.context.on("request", lambda request: self._check(request.url))
        page.on("websocket", lambda socket: self._check(socket.url))

    def allow(self, pattern: str) -> None:
        """Problems that match are none, e.g. `status of 401`, which Chromium writes for each refusal."""
        self._allowed.append(pattern)

    def left(self) -> list[str]:
        """The problems, without those that are allowed."""
        return [each for each in self.problems if not any(re.search(one, each) for one in self._allowed)]

    def _receive(self, message: ConsoleMessage) -> None:
        """Chromium writes violations of the content security policy to the console, as errors."""
        if message.type in ("error", "warning", "assert"):
            self.problems.append(f"console {message.type}: {message.text}")

    def _check(self, url: str) -> None:
        address = urlsplit(url)
        if address.scheme not in INLINE_SCHEMES and address.hostname not in LOOPBACK:
            self.problems.append(f"request to {url}")


@contextmanager
def watched(
    browser: Browser, size: Size = "desktop", scheme: Scheme = "light"
) -> Iterator[tuple[Page, Watch]]:
    """An empty page with storage of its own, and what it does that it may not do."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        has_touch=size == "phone",
        is_mobile=size == "phone",
        reduced_motion="reduce",
        locale="en-GB",
    )
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    try:
        yield page, Watch(page)
    finally:
        context.close()


def overflowing(page: Page) -> list[str]:
    """Elements that make the page wider than the window; none, on a page that can be read on a phone."""
    found: list[str] = page.evaluate(_OVERFLOWING)
    width = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found if found or width <= 0 else [f"the page is {width} px wider than the window"]


def shoot(page: Page, name: str) -> None:
    """A screenshot of the page's first 2400 px in the folder that BROWSER_SHOTS names; none without it."""
    if folder := os.environ.get("BROWSER_SHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        width, height = page.evaluate(
            "[document.documentElement.clientWidth, document.documentElement.scrollHeight]"
        )
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 2400)}
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True, clip=clip)

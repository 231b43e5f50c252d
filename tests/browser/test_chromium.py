"""What pages of this package may not do is noticed when they do it."""

import http.server
import threading
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.browser import chromium
from tests.browser.chromium import find_chromium, overflowing, watched
from tests.browser.conftest import OpenPage

GOOD = """<!doctype html>
<meta name=viewport content="width=device-width">
<link rel=icon href="data:,">
<p>good</p>
"""
BAD = {
    "error": ("<script>console.error('spilt')</script>", "console error: spilt"),
    "exception": ("<script>throw new Error('spilt')</script>", "exception: spilt"),
    "beyond": (
        "<script>new Image().src = 'http://192.0.2.1/x.png'</script>",
        "request to http://192.0.2.1/x.png",
    ),
    "policy": (
        "<meta http-equiv=content-security-policy content=\"script-src 'none'\"><script>1</script>",
        "policy",
    ),
    "socket": ("<script>new WebSocket('ws://192.0.2.1/')</script>", "request to ws://192.0.2.1/"),
    "named": ("<img src='https://example.com/x.png'>", "request to https://example.com/x.png"),
}


class Pages(http.server.BaseHTTPRequestHandler):
    """The pages of BAD by their names, and a good one."""

    def do_GET(self) -> None:
        body = GOOD + BAD.get(self.path[1:], ("", ""))[0]
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the test's output."""


@pytest.fixture(scope="module")
def pages() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_page_is_noticed(name: str, pages: str, browser: Browser) -> None:
    with watched(browser) as (page, watch):
        page.goto(f"{pages}/{name}")
        page.wait_for_load_state("networkidle")
        assert any(BAD[name][1].lower() in problem.lower() for problem in watch.left()), watch.problems
        watch.allow("")
        assert watch.left() == []


def test_a_good_page_is_good(pages: str, page: Page) -> None:
    page.goto(f"{pages}/good")
    assert page.inner_text("p") == "good" and overflowing(page) == []


def test_what_is_too_wide_is_named(pages: str, phone_page: Page) -> None:
    phone_page.goto(f"{pages}/good")
    phone_page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<pre id=wide>' + 'x'.repeat(200) + '</pre>')"
    )
    assert [one.split(":")[0] for one in overflowing(phone_page)] == ["pre#wide"]
    phone_page.evaluate("document.getElementById('wide').style.overflowX = 'auto'")
    assert overflowing(phone_page) == []


def test_sizes_and_schemes(open_page: OpenPage, pages: str) -> None:
    """A phone is 390 px wide, and the colour scheme is the one that was asked for."""
    seen = []
    for size, scheme in (("phone", "dark"), ("desktop", "light")):
        page = open_page(size, scheme)  # type: ignore[arg-type]
        page.goto(f"{pages}/good")
        seen.append(page.evaluate("[innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]"))
    assert seen == [[390, True], [1280, False]]


def test_without_chromium(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped on a machine without one; a failure where CI says that it has one."""
    monkeypatch.setattr(chromium, "NAMES", ("no-such-browser",))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt install chromium"):
        find_chromium()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt install chromium"):
        find_chromium()

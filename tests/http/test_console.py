"""The routes of the console: its files, their headers, and what GET / answers to whom."""

import re
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from runtime.http.app import http_app
from runtime.http.auth import Keys
from runtime.http.console.routes import FOLDER, MEDIA_TYPES, PAGE
from runtime.http.settings import HttpSettings
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES)
MAX_LINES, MAX_CHARS = 400, 120


def client(settings: HttpSettings, prefix: str = "") -> httpx.AsyncClient:
    app = http_app(FakeService(), settings)
    mounted = Starlette(routes=[Mount(prefix, app)]) if prefix else app
    return httpx.AsyncClient(transport=httpx.ASGITransport(mounted), base_url="http://test")


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_browsers_are_led_to_it_and_clients_are_greeted_as_ever(prefix: str) -> None:
    async with client(HttpSettings(keys=Keys(("k",))), prefix) as http:
        led = await http.get(f"{prefix}/", headers=BROWSER)
        greeted = [
            await http.get(f"{prefix}/", headers={"accept": accept}) for accept in ("*/*", "application/json")
        ]
        page = await http.get(f"{prefix}/", headers=BROWSER, follow_redirects=True)
    assert (led.status_code, led.headers["location"], led.headers["vary"]) == (307, "console", "accept")
    assert all(one.status_code == 200 and one.text.startswith("runtime is running") for one in greeted)
    assert page.url.path == f"{prefix}/console" and page.text.startswith("<!doctype html>")


async def test_its_files_are_served_without_a_key_and_asked_for_once() -> None:
    async with client(HttpSettings(keys=Keys(("k",)))) as http:
        for name in NAMES:
            path = "/console" if name == PAGE else f"/console/{name}"
            answer = await http.get(path)
            assert answer.status_code == 200 and answer.content == (FOLDER / name).read_bytes()
            assert answer.headers["content-type"] == MEDIA_TYPES[Path(name).suffix]
            assert answer.headers["cache-control"] == "no-cache"
            tag = answer.headers["etag"]
            for known in (tag, f'"other", W/{tag}'):
                again = await http.get(path, headers={"if-none-match": known})
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert (await http.get(path, headers={"if-none-match": '"other"'})).status_code == 200


async def test_nothing_else_of_its_folder_is_served() -> None:
    async with client(HttpSettings()) as http:
        for name in ("routes.py", "__init__.py", PAGE, "..%2fauth.py", "%2e%2e", "nothing.js"):
            answer = await http.get(f"/console/{name}")
            assert answer.status_code == 404, name
            assert set(answer.json()) == {"error"}


async def test_the_page_may_run_its_own_scripts_and_speak_to_this_server_alone() -> None:
    async with client(HttpSettings()) as http:
        answer = await http.get("/console")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"
    assert "access-control-allow-origin" not in answer.headers
    assert not re.search(r"\son\w+=|\sstyle=|javascript:|<script>|<style", answer.text)


async def test_without_it_nothing_is_served_and_browsers_are_greeted() -> None:
    async with client(HttpSettings(has_console=False)) as http:
        assert (await http.get("/", headers=BROWSER)).text.startswith("runtime is running")
        assert (await http.get("/console")).status_code == 404
        assert (await http.get("/console/app.js")).status_code == 404


@pytest.mark.parametrize("name", NAMES)
def test_its_files_are_readable_and_need_nothing_from_elsewhere(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8")
    lines = text.splitlines()
    assert len(lines) <= MAX_LINES and max(map(len, lines)) <= MAX_CHARS
    links = re.findall(r"""(?:src|href|from|import|url\()\s*=?\s*["'(]([^"')]+)["')]""", text)
    assert not [link for link in links if link.startswith(("http", "//", "/"))], "links are relative"
    made = re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function", text
    )
    assert made is None, "text never becomes markup or code"

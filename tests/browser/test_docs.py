"""The page /docs in a real browser: routes with samples that run, descriptions, keyboard, phone and dark."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.chromium import WAIT_MS, Scheme, Size, overflowing, shoot
from tests.browser.conftest import OpenPage, Site, served

CHAT = "#post_v1_chat_completions"
PATHS = ("/v1/chat/completions", "/v1/messages", "/api/chat", "/generate", "/v1/rerank", "/flush_cache")
TEXTS = (
    "Body",
    "Answer, application/json",
    "Each event, text/event-stream",
    "Refusal",
    "list of ChunkChoice",
)
# operations of each API whose samples are run as the page shows them
SAMPLED = (
    "post_v1_chat_completions",
    "post_v1_responses",
    "get_v1_models",
    "post_v1_messages",
    "post_api_chat",
    "post_generate",
    "post_tokenize",
    "get_health",
)
UNLABELLED = """() =>
    [...document.querySelectorAll("input, textarea, select, button, summary, [tabindex='0']")]
    .filter(node => !(node.labels && node.labels.length))
    .filter(node => !node.getAttribute("aria-label") && !node.textContent.trim())
    .map(node => node.outerHTML.slice(0, 80))"""


def opened(page: Page, site: Site, operation: str = "") -> Page:
    page.goto(f"{site.url}/docs{operation}")
    page.wait_for_selector(f"details{operation}[open]" if operation else "details[id]")
    return page


def test_it_shows_every_route_and_opens_the_one_that_is_named(page: Page, server: Site) -> None:
    opened(page, server, CHAT)
    shown = page.locator("main > details > summary > .path").all_inner_texts()
    assert set(PATHS) <= set(shown) and len(shown) > 70
    assert page.eval_on_selector_all("details[id][open]", "all => all.map(one => one.id)") == [CHAT[1:]]
    seen = page.locator(CHAT).text_content() or ""
    for text in TEXTS:
        assert text in seen, text
    fields = [text.removesuffix("required") for text in page.locator(f"{CHAT} dt").all_text_contents()]
    # must be given, may be, the rest
    assert fields.index("messages") < fields.index("temperature") < fields.index("images_config")
    assert "0 is greedy" in seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_nothing_is_wider_than_the_window(
    size: Size, scheme: Scheme, open_page: OpenPage, server: Site
) -> None:
    """With every route open, and every field has a label."""
    page = opened(open_page(size, scheme), server, CHAT)
    shoot(page, f"docs-{size}-{scheme}")
    count = page.locator("main > details").count()
    page.evaluate("document.querySelectorAll('main > details').forEach(one => { one.open = true; })")
    expect(page.locator("main > details pre.sample")).to_have_count(count, timeout=WAIT_MS)
    assert overflowing(page) == []
    assert page.evaluate(UNLABELLED) == []
    light = (
        page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(251, 250, 248)"
    )
    assert light == (scheme == "light")


def sources(page: Page, operation: str) -> Iterator[tuple[str, str]]:
    """What a person copies: (label of the tab, text)."""
    for tab in page.locator(f"#{operation} [role=tab]").all():
        tab.click()
        yield tab.inner_text(), page.locator(f"#{operation} .sample").text_content() or ""


def run(label: str, source: str, **environment: str) -> str:
    command = ["sh", "-c", source] if label == "curl" else [sys.executable, "-c", source]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("operation", SAMPLED)
def test_samples_run_as_they_are_shown(operation: str, page: Page, server: Site) -> None:
    opened(page, server, f"#{operation}")
    found = dict(sources(page, operation))
    assert list(found) == ["curl", "Python"]
    for label, source in found.items():
        printed = run(label, source)
        assert printed.startswith(("{", "event:", "data:")) and '"error":{' not in printed, printed[:300]


def test_samples_name_the_variable_of_the_key_and_never_the_key(open_page: OpenPage, tmp_path: Path) -> None:
    """Once a key is given, both samples read it from the environment; requests of the page carry it."""
    with served(tmp_path, "--device", "null", "--api-key", "very-secret") as site:
        page = opened(open_page("desktop", "light"), site, "#get_v1_models")
        page.get_by_label("API key").fill("very-secret")
        page.get_by_label("API key").blur()
        for label, source in sources(page, "get_v1_models"):
            assert "very-secret" not in source
            assert '"object"' in run(label, source, RUNTIME_API_KEY="very-secret"), source
        page.locator("#get_v1_models").get_by_role("button", name="Send").click()
        expect(page.locator("#get_v1_models .out")).to_contain_text("200 application", timeout=WAIT_MS)


def test_a_request_is_sent_from_the_page(page: Page, server: Site) -> None:
    opened(page, server, CHAT)
    box = page.locator(CHAT)
    box.get_by_label("Body").fill('{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}')
    box.get_by_role("button", name="Send").click()
    expect(box.locator(".out")).to_contain_text("chat.completion", timeout=WAIT_MS)
    shown = box.locator(".out").inner_text()
    assert re.match(r'200 application/json\n\n\{\n  "id"', shown), shown[:80]


def test_it_works_by_keyboard(page: Page, server: Site) -> None:
    """/ finds, Enter opens a route, arrows change the sample."""
    opened(page, server)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the routes"
    page.keyboard.press("/")
    page.keyboard.type("chat temperature")
    paths = page.locator("main > details:visible .path").all_inner_texts()
    assert "/v1/chat/completions" in paths and "/api/chat" not in paths and len(paths) < 10
    assert page.locator("#state").inner_text() == f"{len(paths)} route{'s' * (len(paths) > 1)}"
    page.locator(f"{CHAT} > summary").focus()
    page.keyboard.press("Enter")
    page.locator(f"{CHAT} [role=tab][aria-selected=true]").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "Python"
    assert "urllib" in page.locator(f"{CHAT} .sample").inner_text()

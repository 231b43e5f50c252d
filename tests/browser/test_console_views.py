"""The views Server and Options of the console, its keys, and how it treats hostile texts and files."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.chromium import WAIT_MS, Watch, shoot
from tests.browser.conftest import Site, served

LONG = {"prompt": "a b c", "max_tokens": 2000, "ignore_eos": True, "rid": "long-one", "stream": True}
HOSTILE = [
    "<script>hacked = 1</script><img src=x onerror='hacked = 1'>",
    "[a](javascript:hacked=1) [b](JaVaScRiPt:hacked=1) [c](data:text/html,x) [d](vbscript:x)",
    "[e](//evil.test/)",
    "[f](&#106;avascript:hacked=1) [g](java\tscript:hacked=1) <javascript:hacked=1> [h](flush_cache)",
    '![i](https://evil.test/x.png) ![j](x" onerror="hacked=1)',
    '```"><script>hacked=1</script>\n</code></pre><script>hacked=1</script>\n```',
    "| <b onclick=hacked=1>a</b> | `</td>` |\n|--|--|\n| <svg/onload=hacked=1> | [k](javascript:x) |",
    "> # <iframe srcdoc=x>\n> - <a href=javascript:x>l</a>\n>   1. **<b>*_[m](javascript:x)_*</b>**",
    "\u202e\u0000\ud800 *__~~`[![",
]
# texts on which a reader that goes back and forth takes time that grows with the square of their length
COSTLY = [
    *("*a " * 40_000, "[a](" * 40_000, "`" * 60_000 + "a", "**_~~" * 30_000, "> " * 40_000, "- " * 40_000),
    *(
        "|" + "-|" * 40_000 + "\n" + "|" + "-|" * 40_000,
        "# " + " " * 80_000 + "x",
        "```" + " " * 80_000 + "`",
    ),
    *("![[" * 40_000, "- a\n" * 5_000 + "  - b\n" * 5_000, "<br " * 40_000, "http://" * 20_000),
]
_RENDER = """async texts => {
  const { Markdown } = await import(new URL("console/markdown.js", document.baseURI));
  const bad = [];
  for (const text of texts) {
    const box = document.createElement("div");
    const markdown = new Markdown(box);
    markdown.update(text.slice(0, text.length / 2));
    markdown.update(text);
    document.body.append(box);
    for (const node of box.querySelectorAll("*")) {
      const href = node.getAttribute("href");
      const isOdd = ["SCRIPT", "IMG", "IFRAME", "SVG", "STYLE"].includes(node.tagName.toUpperCase()) ||
        [...node.attributes].some(one => one.name.startsWith("on")) ||
        (href !== null && !/^(https?|mailto):/.test(href)) || (href ?? "").startsWith(location.origin);
      if (isOdd && !node.closest("button")) bad.push(node.outerHTML.slice(0, 200));
    }
    box.remove();
  }
  return [bad, window.hacked === undefined];
}"""
_MARKDOWN = """async text => {
  const { Markdown } = await import(new URL("console/markdown.js", document.baseURI));
  const whole = document.createElement("div"), grown = document.createElement("div");
  new Markdown(whole).update(text);
  const markdown = new Markdown(grown);
  for (let end = 0; end <= text.length; end++) markdown.update(text.slice(0, end));
  return [whole.innerHTML, grown.innerHTML];
}"""
PIECES = {
    "a *b* **c** `d` ~~e~~": "<p>a <em>b</em> <strong>c</strong> <code>d</code> <del>e</del></p>",
    "snake_case_name 2 * 3 * 4 \\*x\\*": "<p>snake_case_name 2 * 3 * 4 *x*</p>",
    "# a\n\n### b #\ntext\nmore": "<h3>a</h3><h5>b</h5><p>text<br>more</p>",
    "- a\n- b\n  1. c\n  2. d\n- e": "<ul><li><span>a</span></li><li><span>b</span>"
    '<ol start="1"><li><span>c</span></li><li><span>d</span></li></ol></li><li><span>e</span></li></ul>',
    "> a\n> - b": "<blockquote><p>a</p><ul><li><span>b</span></li></ul></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "<b>x</b> &amp;": "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp;</p>",
}


@pytest.fixture(autouse=True, scope="module")
def _patient() -> None:
    expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with a key for users and one for administrators."""
    keys = ("--api-key", "user-key", "--admin-api-key", "admin-key")
    with served(
        tmp_path_factory.mktemp("locked"), "--device", "null", "--null-step-s", "0.02", *keys
    ) as site:
        yield site


def test_keys_and_the_abort_of_a_running_request(page: Page, watches: list[Watch], locked: Site) -> None:
    watches[0].allow("status of 401")
    page.goto(f"{locked.url}/console#/server")
    expect(page.locator("#keys-why")).to_contain_text("API key")  # the server's own words
    page.fill("#key-user", "user-key")
    page.click("text=Use them")
    expect(page.locator("#state-text")).to_have_text("ready")
    expect(page.locator("#requests")).to_contain_text("admin key")
    with ThreadPoolExecutor() as threads:
        headers = {"authorization": "Bearer user-key"}
        url = f"{locked.url}/v1/completions"
        answer = threads.submit(httpx.post, url, json=LONG, headers=headers, timeout=WAIT_MS / 1000)
        page.click("#requests >> text=Give a key")
        page.fill("#key-admin", "admin-key")
        page.click("text=Use them")
        expect(page.locator(".requests code")).to_have_text("long-one")
        shoot(page, "console-requests")
        page.click("[aria-label='Abort long-one']")
        assert '"finish_reason":"abort"' in answer.result().text
    expect(page.locator("#requests")).to_contain_text("None at this moment.")
    kept = page.evaluate("JSON.stringify([Object.keys(localStorage), localStorage, document.cookie])")
    assert "user-key" not in kept and "admin-key" not in kept
    page.click("#views >> text=Options")
    page.fill("[aria-label='Search options']", "api key")
    expect(page.locator(".options-table")).to_contain_text("(hidden)")


def test_charts_move(page: Page, server: Site) -> None:
    page.goto(f"{server.url}/console#/server")
    chart = page.locator(".chart[aria-label='Tokens per second']")
    expect(chart.locator(".value")).to_contain_text("0")
    body = {"prompt": "a b c", "max_tokens": 100, "ignore_eos": True}
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=WAIT_MS / 1000)
        expect(page.locator(".chart[aria-label='Time between tokens'] .value")).to_contain_text("s")
        assert answer.result().status_code == 200
    expect(page.locator(".chart[aria-label='Time to first token'] .value")).to_contain_text("s")
    tops = chart.locator(".plot text").all_text_contents()
    assert float(tops[2].removesuffix("k")) > 1, "the axis has grown"
    assert page.locator(".facts").inner_text().startswith("Model\npocket")
    shoot(page, "console-server")
    page.click("#views >> text=Chat")
    expect(page.locator("#chat")).to_be_visible()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(urlsplit(request.url).path))
    page.wait_for_timeout(2200)  # two looks, if there were any
    assert "/metrics" not in asked, "a server that is not looked at is not asked"


def test_options_with_their_reasons(page: Page, server: Site) -> None:
    page.goto(f"{server.url}/console#/options")
    rows = page.locator(".options-table tbody tr")
    expect(rows.nth(100)).to_be_attached()
    page.fill("[aria-label='Search options']", "--context-length")
    expect(rows.first).to_contain_text("config.json says so")
    expect(rows.first).to_contain_text("2048")
    page.fill("[aria-label='Search options']", "")
    page.check("#only-changed")
    expect(page.locator(".options-table")).not_to_contain_text("--load-format")
    expect(page.locator(".options-table")).to_contain_text("flag --port")


def test_hostile_texts_stay_texts(page: Page, server: Site) -> None:
    page.goto(f"{server.url}/console")
    assert page.evaluate(_RENDER, HOSTILE) == [[], True]


def test_no_text_takes_long_to_draw(page: Page, server: Site) -> None:
    page.goto(f"{server.url}/console")
    assert page.evaluate(_RENDER, COSTLY) == [[], True]


def test_markdown_is_rendered_the_same_whole_and_growing(page: Page, server: Site) -> None:
    page.goto(f"{server.url}/console")
    for text, markup in PIECES.items():
        assert page.evaluate(_MARKDOWN, text) == [markup, markup], text
    for tag, text in {"table": "|a|b|\n|:-|-:|\n|1|2|", "figure": "```py\nx = 1 # y\n```\nz"}.items():
        whole, grown = page.evaluate(_MARKDOWN, text)
        assert whole == grown and f"<{tag}" in whole


def test_files_are_exported_and_imported(
    page: Page, server: Site, tmp_path: Path, watches: list[Watch]
) -> None:
    message = {"id": "m", "parent": None, "order": 0, "role": "assistant", "content": HOSTILE[0] + HOSTILE[1]}
    odd = {"stats": {"ttftS": "<b>", "tokens": 1}, "calls": 7, "finish": [], "error": 0, "reasoning": {}}
    message |= odd  # fields of other types are left out
    conversation = {"id": "c", "title": HOSTILE[0], "nodes": {"m": message}, "leaf": "m", "settings": odd}
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"format": "runtime-console-conversations", "conversations": [conversation]}))
    page.goto(f"{server.url}/console")
    expect(page.locator(".welcome h2")).to_have_text("pocket")
    page.set_input_files("#file", file)
    expect(page.locator("#conversations .open")).to_have_text(HOSTILE[0])
    expect(page.locator(".answer-text")).to_contain_text("hacked = 1")
    with page.expect_download() as download:
        page.click("#export")
    exported = json.loads(download.value.path().read_text())
    assert exported["conversations"][0]["nodes"]["m"]["content"] == message["content"]
    page.once("dialog", lambda dialog: dialog.accept())
    conversation["nodes"] = {"m": message | {"parent": "m"}}  # a circle
    file.write_text(json.dumps({"format": "runtime-console-conversations", "conversations": [conversation]}))
    with page.expect_event("dialog") as shown:
        page.set_input_files("#file", file)
    assert shown.value.message == "A conversation of this file is damaged; nothing was imported."
    expect(page.locator("#conversations .open")).to_have_count(1)
    assert page.evaluate("window.hacked === undefined")

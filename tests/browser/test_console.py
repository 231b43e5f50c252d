"""The console at /console: chats with the embedded model, as a user has them."""

import json
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.chromium import WAIT_MS, Watch, overflowing, shoot
from tests.browser.conftest import Site

TOOLS = """[{"name": "get_weather", "description": "Weather of a city", "parameters":
{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]"""
HOSTILE = ["<img src=x one", "rror=alert(1)> [x](java", "script:alert(2)) <scr", "ipt>alert(3)</script>"]


# waits until so many conversations, with complete answers, are in the browser's database
_WRITTEN = """async count => {
  const done = request => new Promise(resolve => { request.onsuccess = () => resolve(request.result); });
  const isComplete = one => Object.values(one.nodes).some(node => node.finish === "stop");
  const database = await done(indexedDB.open("runtime-console:/console"));
  const all = () => done(database.transaction("conversations").objectStore("conversations").getAll());
  while ((await all()).filter(isComplete).length < count) await new Promise(go => setTimeout(go, 50));
  database.close();
}"""
# texts whose contrast to what is behind them is below the 4.5 of WCAG AA
_FAINT = """() => {
  const parse = colour => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(part => part / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = node => {
    const colour = parse(getComputedStyle(node).backgroundColor);
    return colour[3] === 0 && node.parentElement ? behind(node.parentElement) : colour;
  };
  const contrast = node => {
    const both = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((a, b) => b - a);
    return (both[0] + 0.05) / (both[1] + 0.05);
  };
  const hasText = node => [...node.childNodes].some(one => one.nodeType === 3 && one.textContent.trim());
  return [...document.body.querySelectorAll("*")]
    .filter(node => hasText(node) && node.checkVisibility() && !node.closest("svg, :disabled"))
    .filter(node => contrast(node) < 4.5).map(node => `${node.tagName} ${node.className}: ${contrast(node)}`);
}"""


@pytest.fixture(autouse=True, scope="module")
def _patient() -> None:
    expect.set_options(timeout=WAIT_MS)


def enter(page: Page, server: Site, **settings: str) -> None:
    """Opens the console by the way of GET /, with these settings."""
    page.goto(f"{server.url}/")
    expect(page.locator(".welcome h2")).to_have_text("pocket")
    assert page.url == f"{server.url}/console"
    if settings:
        choose(page, **settings)


def choose(page: Page, **settings: str) -> None:
    """Sets settings of the conversation."""
    page.click("#settings-button")
    for name, value in settings.items():
        field = page.locator(f"#set-{name}")
        if field.evaluate("node => node.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    page.click("#settings [aria-label='Close settings']")


def ask(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def answers(page: Page) -> Locator:
    return page.locator(".message.assistant .answer-text")


def ended(page: Page, count: int = 1) -> None:
    """Waits until so many answers are complete: each has its figures then."""
    expect(page.locator(".message.assistant[aria-busy=false] .stats")).to_have_count(count)


def test_a_chat_streams_and_survives_a_reload(page: Page, server: Site) -> None:
    enter(page, server, temperature="0")
    ask(page, "Count from 1 to 5.")
    ended(page)
    expect(answers(page)).to_have_text("1, 2, 3, 4, 5")
    figures = page.locator(".stats").inner_text()
    assert "tokens/s" in figures and "TTFT" in figures and "tokens" in figures
    expect(page.locator("#spoken")).to_have_text("1, 2, 3, 4, 5")  # for screen readers, in whole sentences
    shoot(page, "console-chat")
    page.click("#new")
    ask(page, "Hello!")
    ended(page)
    expect(page.locator("#conversations .open")).to_have_text(["Hello!", "Count from 1 to 5."])
    page.evaluate(_WRITTEN, 2)
    page.reload()
    expect(page.locator("#conversations .open")).to_have_text(["Hello!", "Count from 1 to 5."])
    page.click("text=Count from 1 to 5.")
    expect(answers(page)).to_have_text("1, 2, 3, 4, 5")
    expect(page.locator("#chips")).to_contain_text("Temperature 0")


def test_an_answer_is_stopped_and_continued(page: Page, server: Site) -> None:
    enter(page, server, temperature="0")
    choose(page, extra='{"ignore_eos": true}', max_tokens="1500")
    ask(page, "Count from 1 to 5.")
    expect(answers(page)).to_contain_text("1, 2")
    page.keyboard.press("Escape")
    expect(page.locator(".finish")).to_contain_text("You stopped the answer.")
    before = answers(page).inner_text()
    choose(page, max_tokens="3")
    page.click("text=Continue")
    expect(page.locator(".finish")).to_contain_text("limit of tokens")
    assert answers(page).inner_text().startswith(before.rstrip())


def test_versions_of_answers_and_of_questions(page: Page, server: Site) -> None:
    enter(page, server, temperature="0")
    ask(page, "Count from 1 to 5.")
    ended(page)
    page.click("[aria-label='Answer again']")
    expect(page.locator(".message.assistant .versions")).to_have_text("2 / 2")
    ended(page)
    page.press("#text", "ArrowUp")  # in an empty box: edits the last message
    page.fill("[aria-label='Edit the message']", "Count from 1 to 3.")
    page.press("[aria-label='Edit the message']", "Control+Enter")
    expect(answers(page)).to_have_text("1, 2, 3")
    ended(page)
    page.click(".message.user [aria-label='Version before']")
    expect(page.locator(".bubble")).to_have_text("Count from 1 to 5.")
    expect(page.locator(".message.assistant .versions")).to_have_text("2 / 2")
    expect(answers(page)).to_have_text("1, 2, 3, 4, 5")


def test_reasoning_is_folded_and_a_tool_is_answered(page: Page, server: Site) -> None:
    enter(page, server, temperature="0")
    choose(page, reasoning="on")
    ask(page, "What is 3 plus 4?")
    ended(page)
    expect(answers(page)).to_have_text("7")
    expect(page.locator("details.reasoning:not([open]) summary")).to_contain_text("Reasoned")
    expect(page.locator("details.reasoning .prose")).to_be_hidden()
    page.click("details.reasoning summary")
    expect(page.locator("details.reasoning .prose")).to_contain_text("3 + 4")
    page.click("#new")
    choose(page, reasoning="", tools=TOOLS)
    expect(page.locator("#chips")).to_contain_text("1 tool")
    ask(page, "What is the weather in Paris?")
    expect(page.locator(".call")).to_contain_text("get_weather")
    expect(page.locator(".call pre")).to_have_text('{\n  "city": "Paris"\n}')
    expect(page.locator("#send")).to_be_disabled()  # first the result
    with page.expect_request("**/v1/chat/completions") as sent:
        page.fill(".call textarea", '{"degrees": 21}')
        page.click("text=Send result")
    messages: list[dict[str, Any]] = sent.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    assert messages[2]["content"] == '{"degrees": 21}'
    ended(page, 2)
    assert "21" in answers(page).last.inner_text()


def test_what_a_model_writes_is_text(page: Page, server: Site) -> None:
    deltas = [{"content": text, "reasoning_content": text} for text in HOSTILE]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    stream = "".join([f"data: {json.dumps(event)}\n\n" for event in events]) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream")
    )
    enter(page, server)
    ask(page, "Hello!")
    ended(page)
    expect(answers(page)).to_have_text("<img src=x onerror=alert(1)> x <script>alert(3)</script>")
    assert page.locator(".message :is(img, script, a)").count() == 0


def test_refusals_name_the_remedy_and_can_be_tried_again(
    page: Page, server: Site, watches: list[Watch]
) -> None:
    watches[0].allow("status of 400")
    enter(page, server, temperature="0")
    choose(page, extra='{"temprature": 1}')
    ask(page, "Hello!")
    expect(page.locator(".failure")).to_contain_text("temperature")
    page.click("#settings-button")
    page.fill("#set-top_p", "7")
    expect(page.locator("#hint-top_p")).to_have_text("Top p must be at most 1.")
    page.click("text=Set back to the defaults")
    page.fill("#set-max_tokens", "50")
    page.keyboard.press("Escape")
    page.click("text=Try again")
    ended(page)
    expect(page.locator(".failure")).to_have_count(0)


def test_the_keyboard_alone_is_enough(page: Page, server: Site) -> None:
    enter(page, server)
    expect(page.locator("#text")).to_be_focused()
    page.keyboard.press("Control+,")
    expect(page.locator("#set-system")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.type("0")  # the temperature
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("Hello!\n")
    ended(page)
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".welcome")).to_be_visible()
    expect(page.locator("#text")).to_be_focused()
    page.keyboard.press("Control+K")
    page.keyboard.type("nothing has this")
    expect(page.locator("#conversations")).to_have_text("None has this text.")
    page.keyboard.press("Alt+2")
    expect(page.locator("#server")).to_be_visible()
    page.keyboard.press("Alt+1")
    page.locator("#help-button").focus()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_contain_text("New conversation")
    page.keyboard.press("Escape")
    unnamed = page.locator("button:visible, input:visible, textarea:visible, select:visible").evaluate_all(
        "all => all.filter(one => !(one.ariaLabel || one.textContent.trim() || one.labels?.length))"
        ".map(one => one.outerHTML)"
    )
    assert unnamed == []


def test_it_fits_a_phone(phone_page: Page, server: Site) -> None:
    page = phone_page
    enter(page, server, temperature="0")
    page.fill("#text", "Hello! " + "x" * 200)
    page.tap("#send")
    expect(answers(page)).not_to_be_empty()
    page.tap("#send")  # which stops it
    expect(page.locator(".message-foot .actions")).to_have_count(2)
    assert overflowing(page) == []
    page.tap("#menu")
    expect(page.locator("#sidebar")).to_be_visible()
    shoot(page, "console-phone-menu")
    page.tap("#views >> text=Server")
    expect(page.locator(".chart")).to_have_count(6)
    assert overflowing(page) == []
    page.tap("#menu")
    page.tap("#views >> text=Options")
    expect(page.locator(".options-table tr").nth(9)).to_be_visible()
    assert overflowing(page) == []
    shoot(page, "console-phone-options")


def test_its_theme_is_the_systems_until_one_is_chosen(dark_page: Page, server: Site) -> None:
    page = dark_page
    enter(page, server)
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    choose(page, temperature="0")
    ask(page, "Count from 1 to 5.")
    ended(page)
    assert page.evaluate(paper) == "rgb(21, 22, 23)" and page.evaluate(_FAINT) == []
    page.click("#theme")
    assert page.evaluate(paper) == "rgb(251, 250, 248)" and page.evaluate(_FAINT) == []
    page.reload()
    assert page.evaluate(paper) == "rgb(251, 250, 248)"
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate(paper) == "rgb(21, 22, 23)"

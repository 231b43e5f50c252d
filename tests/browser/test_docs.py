"""The page /docs in a real browser, which runs its script."""

from playwright.sync_api import Page

from tests.browser.conftest import Site

PATHS = ("/v1/chat/completions", "/v1/messages", "/api/chat", "/generate", "/v1/rerank", "/flush_cache")
TEXTS = (
    "Body",
    "Answer, application/json",
    "Each event, text/event-stream",
    "Refusal",
    "list of ChunkChoice",
)


def test_it_shows_every_route_and_opens_the_one_that_is_named(page: Page, server: Site) -> None:
    page.goto(f"{server.url}/docs#post_v1_chat_completions")
    page.wait_for_selector("details[id][open]")
    shown = page.locator("summary > .path").all_inner_texts()
    assert set(PATHS) <= set(shown) and len(shown) > 70
    assert page.eval_on_selector_all("details[id][open]", "all => all.map(one => one.id)") == [
        "post_v1_chat_completions"
    ]
    seen = page.locator("#post_v1_chat_completions").text_content() or ""
    for text in TEXTS:
        assert text in seen, text
    fields = page.locator("#post_v1_chat_completions td.path").all_text_contents()
    # must be given, may be, the rest
    assert fields.index("messages") < fields.index("temperature") < fields.index("images_config")

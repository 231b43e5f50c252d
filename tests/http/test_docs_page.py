"""The page /docs in a real browser, which runs its script. Needs Chromium (Debian: apt install chromium), as
no other test does."""

import re
import shutil
from pathlib import Path

import anyio
import pytest

from tests.http.fake import FakeService
from tests.http.serving import serving

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [pytest.mark.anyio, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]


async def page(fragment: str, folder: Path) -> str:
    """The page after its script has run, as HTML."""
    assert CHROMIUM is not None
    async with serving(FakeService()) as (host, port):
        ended = await anyio.run_process(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={folder}",
                "--virtual-time-budget=8000",
                "--dump-dom",
                f"http://{host}:{port}/docs{fragment}",
            ]
        )
    return ended.stdout.decode()


async def test_it_shows_every_route_and_opens_the_one_that_is_named(tmp_path: Path) -> None:
    seen = await page("#post_v1_chat_completions", tmp_path)
    for path in (
        "/v1/chat/completions",
        "/v1/messages",
        "/api/chat",
        "/generate",
        "/v1/rerank",
        "/flush_cache",
    ):
        assert f">{path}<" in seen
    assert len(re.findall(r"<details id=", seen)) > 70
    opened = re.findall(r"<details id=\"([^\"]*)\" open", seen)
    assert opened == ["post_v1_chat_completions"]
    for text in (
        "Body",
        "Answer, application/json",
        "Each event, text/event-stream",
        "Refusal",
        ">messages<",
        ">choices<",
        "list of ChatPiece",
    ):
        assert text in seen, text
    # must be given, may be, the rest
    assert seen.index(">messages<") < seen.index(">temperature<") < seen.index(">images_config<")
    assert "Error" not in re.sub(r"OpenAIError", "", seen.split("<main", 1)[1].split("<script", 1)[0])

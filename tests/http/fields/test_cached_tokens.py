"""Where cached prompt tokens came from, as answers tell it."""

import json
from typing import Any

import httpx
import pytest

from runtime.http.app import http_app
from runtime.messages.requests import CacheSources
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": ["a", "b"], "n": 2},
}


async def post(service: FakeService, path: str, **body: Any) -> Any:
    """The answer, or the chunks of a stream."""
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(service)), base_url="http://test"
    ) as http:
        response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    if "stream" not in body:
        return response.json()
    return [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("loaded", "storage", "expected"),
    [
        (CacheSources(), None, {"device": 3, "host": 0}),
        (CacheSources(2, 0), None, {"device": 1, "host": 2}),
        (CacheSources(1, 2), "file", {"device": 0, "host": 1, "storage": 2, "storage_backend": "file"}),
    ],
)
async def test_the_native_answer_reports(
    loaded: CacheSources, storage: str | None, expected: dict[str, Any]
) -> None:
    service = FakeService(loaded=loaded, storage=storage)
    answer = await post(service, "/generate", text="hi")
    chunks = await post(service, "/generate", text="hi", stream=True)
    assert all(details["meta_info"]["cached_tokens_details"] == expected for details in (answer, *chunks))


@pytest.mark.parametrize("path", ROUTES)
async def test_usage_reports_when_asked(path: str) -> None:
    count = len(ROUTES[path].get("prompt", "1"))
    for report in (False, True):
        service = FakeService(loaded=CacheSources(2, 0), has_cache_report=report)
        whole = (await post(service, path, **ROUTES[path]))["usage"]
        streamed = (
            await post(service, path, **ROUTES[path], stream=True, stream_options={"include_usage": True})
        )[-1]["usage"]
        details = {"cached_tokens_details": {"device": count, "host": 2 * count}} if report else {}
        assert (
            whole["prompt_tokens_details"]
            == streamed["prompt_tokens_details"]
            == {"cached_tokens": 3 * count} | details
        )

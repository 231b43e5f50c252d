"""Answers are of the types that the OpenAPI document tells: whole answers by being encoded as them, events by
this test."""

import json
import re
from typing import Any

import httpx
import msgspec
import pytest

from runtime.http.app import http_app
from runtime.http.schema.operations import OPERATIONS
from runtime.messages.requests import CacheSources
from runtime.parsing.detect import AnswerFormats
from tests.http.fake import FakeService
from tests.http.openai.test_tools import ADD, HERMES, NOW, SAYS
from tests.http.serving import stepping

pytestmark = pytest.mark.anyio

ROWS = [operation for operations in OPERATIONS.values() for operation in operations]
# forms: tests/e2e/test_transcriptions.py
STREAMS = [row for row in ROWS if row.media in ("sse", "ndjson") and not row.form]
EMPTY = {  # refused, or answered with an empty body
    "/api/pull",
    "/api/push",
    "/api/create",
    "/api/copy",
    "/api/delete",
    "/api/blobs/{digest}",
    "/close_session",
}
MORE: dict[str, list[dict[str, Any]]] = {  # what makes events have other fields
    "/v1/chat/completions": [
        {"tools": [ADD, NOW]},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"return_token_ids": True, "return_prompt_token_ids": True},
        {"stream_options": {"continuous_usage_stats": True}},
        {"stream_options": {"include_usage": True}},
    ],
    "/v1/completions": [
        {"logprobs": 2, "echo": True},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True}},
        {"prompt": ["a", "b"]},
    ],
    "/v1/responses": [
        {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
        {"tools": [ADD["function"] | {"type": "function"}]},
    ],
    "/v1/messages": [
        {
            "tools": [{"name": "add", "input_schema": {"type": "object"}}],
            "thinking": {"type": "enabled", "budget_tokens": 4},
        }
    ],
    "/api/chat": [{"tools": [ADD]}, {"logprobs": True, "top_logprobs": 1}],
    "/api/generate": [{"think": True}, {"raw": True}],
    "/invocations": [],
    "/generate": [
        {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0, "token_ids_logprob": [1]},
        {"text": ["a", "b"]},
    ],
}


def is_one_of(value: bytes, kinds: tuple[Any, ...]) -> bool:
    for kind in kinds:
        try:
            msgspec.json.decode(value, type=kind)
            return True
        except msgspec.ValidationError as error:
            print(error, value)
    return False


@pytest.mark.parametrize("formats", [AnswerFormats(), HERMES], ids=["plain", "parsed"])
@pytest.mark.parametrize("fail_after", [None, 3])
@pytest.mark.parametrize("operation", STREAMS, ids=lambda operation: operation.path)
async def test_answers_and_events(operation: Any, formats: AnswerFormats, fail_after: int | None) -> None:
    says = SAYS if formats is HERMES else None
    for more in [{}, *MORE[operation.path]]:
        service = FakeService(
            formats=formats, says=says, has_cache_report=True, storage="file", loaded=CacheSources(1, 1)
        )
        body = (
            {name: value for name, value in operation.example.items() if name not in more}
            | {"max_tokens": 40}
            | more
        )
        if operation.path in ("/v1/responses", "/generate") or operation.path.startswith("/api/"):
            del body["max_tokens"]
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(http_app(service)), base_url="http://test"
        ) as http:
            whole = await http.post(
                operation.path,
                json={k: v for k, v in body.items() if k != "stream_options"} | {"stream": False},
            )
            assert whole.status_code == 200 and is_one_of(whole.content, operation.answers), whole.text
            service.hold, service.fail_after = True, service.fail_after if fail_after is None else fail_after
            async with stepping(service):
                stream = await http.post(operation.path, json=body | {"stream": True})
        events = [
            line.removeprefix("data: ")
            for line in stream.text.split("\n")
            if line.startswith(("data: {", "{"))
        ]
        assert len(events) > 2 and stream.status_code == 200
        for event in events:
            assert is_one_of(event.encode(), operation.events), event


def test_every_route_has_its_types() -> None:
    for operation in ROWS:
        has_json = operation.media not in ("text", "binary", "html", "any") and operation.path not in EMPTY
        assert bool(operation.answers) == has_json, operation.path
        is_stream = operation in STREAMS or (operation.methods, operation.path) in (
            ("GET", "/v1/responses/{id}"),
            ("POST", "/v1/audio/transcriptions"),  # whose requests are forms
            ("POST", "/v1/audio/translations"),
        )
        assert bool(operation.events) == is_stream, operation.path


async def test_refusals_are_reported_in_the_words_of_their_api() -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(FakeService())), base_url="http://test"
    ) as http:
        document = (await http.get("/openapi.json")).json()
        for path, name in (
            ("/v1/messages", "AnthropicError"),
            ("/api/chat", "OllamaError"),
            ("/generate", "OpenAIError"),
        ):
            refusal = document["paths"][path]["post"]["responses"]["default"]["content"]["application/json"][
                "schema"
            ]
            assert re.search(r"\w+$", refusal["$ref"])[0] == name  # type: ignore[index]
            answer = await http.post(path, content=b"{")
            properties = document["components"]["schemas"][name]["properties"]
            assert answer.status_code == 400 and set(json.loads(answer.text)) == set(properties)

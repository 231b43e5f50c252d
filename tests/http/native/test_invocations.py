"""POST /invocations: the API is found by the body's fields."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from runtime.http.app import http_app
from tests.http.fake import FakeService

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": HI, "max_tokens": 3}, "chat.completion"),
        ({"prompt": "a", "max_tokens": 3}, "text_completion"),
        ({"prompt": [5, 6], "max_tokens": 3, "bad_words": []}, "text_completion"),
    ],
)
def test_the_fields_say_which_api_it_is(body: dict[str, Any], kind: str) -> None:
    with TestClient(http_app(FakeService())) as http:
        assert http.get("/ping").status_code == 200
        assert http.post("/invocations", json=body).json()["object"] == kind
        streamed = http.post("/invocations", json=body | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert f'"object":"{kind}' in streamed.text and streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "none of them"),
        ({"messages": HI, "prompt": "a"}, "prompt", "messages and prompt"),
        ({"messages": HI, "temprature": 1}, "temprature", "did you mean temperature"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens"),
        ({"input": "a"}, None, "--is-embedding"),
    ],
)
def test_refusals_are_those_of_the_api(body: dict[str, Any], param: str | None, message: str) -> None:
    with TestClient(http_app(FakeService())) as http:
        answer = http.post("/invocations", json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param and message in error["message"]

"""A prompt that does not fit, in the words by which agents know that they must shorten it."""

from typing import Any

import anyio
import httpx
import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

from runtime.http.app import http_app
from tests.http.fake import FakeService
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

TEXT = "x" * 100_001
CHAT = [{"role": "user", "content": TEXT}]
MESSAGE_END = (
    "tokens > 99999 maximum; this model's maximum context length is 100000 tokens here, "
    "with at least one token of output"
)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": CHAT}, "messages"),
        ("/v1/completions", {"prompt": TEXT}, "prompt"),
        ("/v1/responses", {"input": TEXT}, "input"),
        ("/generate", {"text": TEXT}, "text"),
        ("/v1/messages", {"model": "default", "max_tokens": 9, "messages": CHAT}, None),
        ("/api/chat", {"model": "default", "messages": CHAT}, None),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_in_all_apis(path: str, body: dict[str, Any], param: str | None, is_stream: bool) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(FakeService())), base_url="http://test"
    ) as http:
        answer = await http.post(path, json=body | {"stream": is_stream})
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert (
        answer.status_code == 400
        and message.startswith("prompt is too long: 100")
        and message.endswith(MESSAGE_END)
    )
    # imported here: it takes seconds, which each process of the suite would spend
    from litellm.litellm_core_utils.exception_mapping_utils import ExceptionCheckers

    assert ExceptionCheckers.is_error_str_context_window_exceeded(message)
    if param is not None:
        assert (error["code"], error["param"], error["type"]) == (
            "context_length_exceeded",
            param,
            "invalid_request_error",
        )


async def test_langchain_knows_it() -> None:
    async with serving(FakeService()) as (host, port):
        model = ChatOpenAI(model="org/fake", base_url=f"http://{host}:{port}/v1", api_key="x", max_retries=0)
        with pytest.raises(ContextOverflowError) as error:
            await anyio.to_thread.run_sync(model.invoke, TEXT)
    assert isinstance(error.value, openai.BadRequestError)

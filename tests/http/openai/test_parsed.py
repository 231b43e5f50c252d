"""Tool calls and reasoning of /v1/chat/completions: a stream says what the whole says, whatever else is asked
for."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.http.app import http_app
from runtime.parsing.channel_parser import CHANNEL_FORMATS
from runtime.parsing.detect import AnswerFormats
from runtime.parsing.tool_call_formats import TOOL_CALL_FORMATS
from tests.http.fake import FakeService
from tests.parsing.test_tool_call_formats import GOLDEN

pytestmark = pytest.mark.anyio

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "s": {"type": "string"}},
            },
        },
    }
    for name in ("f", "g")
]
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}


NAMES = sorted([*TOOL_CALL_FORMATS, *CHANNEL_FORMATS])
FRAMED = {
    "gpt-oss": "<|channel|>analysis<|message|>why<|end|><|start|>assistant",
    "muse": " to=self<|message|>why<|eom|><|start|>assistant",
}


def says(
    text: str, size: int = 3, tools: str | None = "hermes", thinking: str | None = "qwen3"
) -> FakeService:
    """Answers with a text, in tokens of some characters."""
    return FakeService(
        formats=AnswerFormats(tool_calls=tools, reasoning=thinking),
        says=[text[i : i + size] for i in range(0, len(text), size)],
    )


async def post(service: FakeService, **fields: Any) -> Any:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(service)), base_url="http://test"
    ) as client:
        response = await client.post("/v1/chat/completions", json=ASK | fields)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def joined(chunks: list[Any]) -> list[Any]:
    """The choices that a stream amounts to, as the whole answer would have them."""
    choices: dict[int, Any] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"], {"message": {"content": ""}, "logprobs": [], "token_ids": []}
            )
            assert "finish_reason" not in choice, "nothing follows the end"
            delta, message = part["delta"], choice["message"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    assert call["type"] == "function" and call["id"] and call["function"]["arguments"] == ""
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                else:
                    assert call["index"] == len(calls) - 1 and list(call["function"]) == ["arguments"]
                    calls[-1]["arguments"] += call["function"]["arguments"]
            choice["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            choice["token_ids"] += part.get("token_ids", ())
            if part["finish_reason"]:
                choice["finish_reason"] = part["finish_reason"]
    return [choices[i] for i in sorted(choices)]


def plain(choices: list[Any]) -> list[Any]:
    """Choices of a whole answer, without what is drawn."""
    kept = []
    for choice in choices:
        message = {k: v for k, v in choice["message"].items() if k not in ("role", "refusal")}
        message["content"] = message["content"] or ""
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [call["function"] for call in calls]
        kept.append(
            {
                "message": message,
                "logprobs": (choice["logprobs"] or {"content": []})["content"],
                "token_ids": choice.get("token_ids", []),
                "finish_reason": choice["finish_reason"],
            }
        )
    return kept


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    size=st.integers(1, 30),
    n=st.integers(1, 2),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "logprobs": st.just(True),
            "return_token_ids": st.just(True),
            "parallel_tool_calls": st.booleans(),
            "separate_reasoning": st.booleans(),
            "stream_reasoning": st.booleans(),
            "include_reasoning": st.booleans(),
            "tool_choice": st.sampled_from(["auto", "none"]),
            "stream_options": st.just({"include_usage": True}),
        },
    ),
)
async def test_streams_say_what_whole_answers_say(
    name: str, size: int, n: int, fields: dict[str, Any]
) -> None:
    text = FRAMED.get(name, "<think>\nwhy\n</think>\n\n") + GOLDEN[name]
    service = says(text, size, name, name if name in CHANNEL_FORMATS else "qwen3")
    whole = await post(
        service, n=n, **{key: value for key, value in fields.items() if key != "stream_options"}
    )
    stream = await post(service, n=n, stream=True, **fields)
    assert joined(stream) == plain(whole["choices"])
    if "stream_options" in fields:
        assert stream[-1]["usage"] == whole["usage"]
    if fields.get("logprobs"):
        assert [len(choice["logprobs"]["content"]) for choice in whole["choices"]] == [
            len(range(0, len(text), size))
        ] * n
    message = whole["choices"][0]["message"]
    num_calls = (
        0 if fields.get("tool_choice") == "none" else 1 if fields.get("parallel_tool_calls") is False else 2
    )
    separates = fields.get("separate_reasoning") is not False
    # these count at the start of the answer only
    if num_calls and separates or name not in ("llama3", "pythonic"):
        assert len(message.get("tool_calls", ())) == num_calls
        assert whole["choices"][0]["finish_reason"] == ("tool_calls" if num_calls else "stop")
    assert message.get("reasoning_content") == (
        "why" if separates and fields.get("include_reasoning") is not False else None
    )


async def test_whole_reasoning_leaves_in_one_piece() -> None:
    service = says("<think>one two three</think>42", 2)
    chunks = await post(service, stream=True, stream_reasoning=False)
    assert [t for c in chunks if (t := c["choices"][0]["delta"].get("reasoning_content"))] == [
        "one two three"
    ]


async def test_ids_are_such_as_the_templates_take() -> None:
    call = (await post(says(GOLDEN["kimi_k2"], tools="kimi_k2")))["choices"][0]["message"]["tool_calls"][0]
    assert call["id"] == "functions.f:0"
    call = (await post(says(GOLDEN["mistral"], tools="mistral")))["choices"][0]["message"]["tool_calls"][0]
    assert len(call["id"]) == 9 and call["id"].isalnum()

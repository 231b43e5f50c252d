"""POST /parse_function_call and /separate_reasoning."""

from typing import Any

import httpx
import pytest

from runtime.http.app import http_app
from runtime.http.native import parse
from runtime.parsing.detect import AnswerFormats
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio

TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
]
HERMES = 'Well.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
QWEN = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
HARMONY = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
NONE = AnswerFormats()


async def post(path: str, formats: AnswerFormats = NONE, **fields: Any) -> httpx.Response:
    transport = httpx.ASGITransport(http_app(FakeService(formats=formats)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.post(path, json=fields)


@pytest.mark.parametrize(
    ("text", "parser", "normal", "parameters"),
    [
        (HERMES, None, "Well.", '{"a": 1}'),
        (HERMES, "qwen25", "Well.", '{"a": 1}'),
        (QWEN, "qwen3_coder", "", '{"a": 1}'),
        (HARMONY, "gpt-oss", "", "{}"),
        ("Nothing.", None, "Nothing.", None),
    ],
)
async def test_calls(text: str, parser: str | None, normal: str, parameters: str | None) -> None:
    answer = (
        await post(
            "/parse_function_call", AnswerFormats("hermes"), text=text, tools=TOOLS, tool_call_parser=parser
        )
    ).json()
    calls = [] if parameters is None else [{"tool_index": 0, "name": "f", "parameters": parameters}]
    assert answer == {"normal_text": normal, "calls": calls}


@pytest.mark.parametrize("size", [1, 3, 64])
async def test_long_texts_are_parsed_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "PIECE_CHARS", size)
    answer = (
        await post("/parse_function_call", AnswerFormats("hermes"), text=HERMES + "Done.", tools=TOOLS)
    ).json()
    calls = [{"tool_index": 0, "name": "f", "parameters": '{"a": 1}'}]
    assert answer == {"normal_text": "Well.Done.", "calls": calls}
    answer = (
        await post("/separate_reasoning", AnswerFormats(reasoning="qwen3"), text="<think>so</think>Yes.")
    ).json()
    assert answer == {"reasoning_text": "so", "text": "Yes."}


@pytest.mark.parametrize(
    ("text", "parser", "expected"),
    [
        ("<think>so</think>Yes.", None, ("so", "Yes.")),
        ("so</think>Yes.", "deepseek-r1", ("so", "Yes.")),
        ("Yes.", "qwen3", ("", "Yes.")),
        (
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            "gpt-oss",
            ("so", "Yes."),
        ),
    ],
)
async def test_reasoning(text: str, parser: str | None, expected: tuple[str, str]) -> None:
    answer = (
        await post(
            "/separate_reasoning", AnswerFormats(reasoning="qwen3"), text=text, reasoning_parser=parser
        )
    ).json()
    assert (answer["reasoning_text"], answer["text"]) == expected


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/parse_function_call", {"text": "x", "tools": TOOLS}, "tool_call_parser"),
        ("/parse_function_call", {"text": "x", "tools": TOOLS, "tool_call_parser": "y"}, "tool_call_parser"),
        (
            "/parse_function_call",
            {"text": "x", "tools": [{}], "tool_call_parser": "hermes"},
            "tools[0].function.name",
        ),
        ("/separate_reasoning", {"text": "x"}, "reasoning_parser"),
        ("/separate_reasoning", {"text": "x", "reasoning_parser": "y"}, "reasoning_parser"),
    ],
)
async def test_refusals(path: str, fields: dict[str, Any], param: str) -> None:
    answer = await post(path, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param and "--" not in answer.text

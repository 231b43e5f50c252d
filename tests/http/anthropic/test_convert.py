"""How requests of Anthropic's API become chats."""

from typing import Any

import httpx
import msgspec
import pytest

from runtime.http.anthropic.convert import chat_body
from runtime.http.anthropic.message_request import MessagesBody
from runtime.http.app import http_app
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": "org/fake", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
CONVERSATION: dict[str, Any] = {
    **ASK,
    "system": [
        {"type": "text", "text": "be"},
        {"type": "text", "text": "kind", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "So:"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "bad", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ],
    "tools": [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}],
    "thinking": {"type": "enabled", "budget_tokens": 3},
    "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    "stop_sequences": ["."],
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
}


def test_a_conversation_becomes_a_chat() -> None:
    chat = chat_body(msgspec.convert(CONVERSATION, MessagesBody))
    messages = [(m.role, m.content, m.tool_call_id) for m in chat.messages]
    assert messages == [
        ("system", "be\nkind", None),
        ("user", "add", None),
        ("assistant", "So:", None),
        ("tool", "2", "c1"),
        ("tool", "Error: bad", "c2"),
        ("user", "And?", None),
        ("assistant", "It is", None),
    ]
    (call,) = chat.messages[2].tool_calls or []
    assert (call.id, call.function.name, call.function.arguments, chat.messages[2].reasoning_content) == (
        "c1",
        "add",
        '{"a":1}',
        "hm",
    )


def test_options_of_a_conversation_become_those_of_a_chat() -> None:
    chat = chat_body(msgspec.convert(CONVERSATION, MessagesBody))
    assert (
        chat.continue_final_message
        and chat.add_generation_prompt is False
        and chat.stop == ["."]
        and chat.max_tokens == 8
    )
    assert chat.tools == [
        {
            "type": "function",
            "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
        }
    ]
    assert (
        chat.tool_choice == {"type": "function", "function": {"name": "add"}}
        and chat.parallel_tool_calls is False
    )
    assert (
        chat.chat_template_kwargs == {"enable_thinking": True, "thinking": True, "thinking_budget": 3}
        and chat.reasoning_effort == "low"
    )
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }


@pytest.mark.parametrize(
    ("edits", "reasoning"),
    [
        ([], ["a", None, "b", "c"]),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], ["a", None, "b", "c"]),
        ([{"type": "clear_thinking_20251015"}], [None, None, None, "c"]),
        (
            [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}],
            [None, None, "b", "c"],
        ),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "all"}}], ["a", None, "b", "c"]),
    ],
)
def test_reasoning_of_older_answers_is_left_out(edits: list[Any], reasoning: list[str | None]) -> None:
    """Claude Code sends the second of these with everything."""
    turns: list[Any] = []
    for text in ("a", None, "b", "c"):
        thought = [] if text is None else [{"type": "thinking", "thinking": text, "signature": ""}]
        turns += [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [*thought, {"type": "text", "text": "so"}]},
        ]
    turns.append({"role": "user", "content": "and?"})
    body = msgspec.convert(ASK | {"messages": turns, "context_management": {"edits": edits}}, MessagesBody)
    assert [
        message.reasoning_content for message in chat_body(body).messages if message.role == "assistant"
    ] == reasoning


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
async def test_a_call_cannot_be_required_without_tools(choice: Any) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(FakeService())), base_url="http://test"
    ) as http:
        answer = await http.post("/v1/messages", json=ASK | {"tool_choice": choice})
        assert answer.status_code == 400 and "there are no tools" in answer.json()["error"]["message"]
        free = await http.post("/v1/messages", json=ASK | {"tool_choice": {"type": "auto"}})
    assert free.status_code == 200


async def test_other_edits_are_refused() -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(FakeService())), base_url="http://test"
    ) as http:
        answer = await http.post(
            "/v1/messages", json=ASK | {"context_management": {"edits": [{"type": "compact_20260112"}]}}
        )
    assert answer.status_code == 400 and "compact_20260112" in answer.json()["error"]["message"]

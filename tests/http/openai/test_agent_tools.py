"""Tools of /v1/responses that are no plain functions: in namespaces, and such that take a text. Codex sends
both."""

import json
from typing import Any

import pytest

from runtime.http.openai.completion_request import ChatBody, Message
from runtime.http.openai.custom_tools import custom_tools, input_of, with_functions
from runtime.http.openai.responses.tools import by_model_name, chat_tools, check, model_name
from runtime.messages.constraint import Calls, JsonSchema
from runtime.parsing.detect import AnswerFormats
from tests.http.fake import FakeService
from tests.http.openai.test_responses import client_of

pytestmark = pytest.mark.anyio

LIST: dict[str, Any] = {
    "type": "function",
    "name": "list",
    "description": None,
    "parameters": {"type": "object"},
    "strict": False,
}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "namespace", "name": "files__", "description": "Files.", "tools": [LIST]},
    PATCH,
    {"type": "web_search"},
]
SAYS = [
    "<tool_call>\n",
    '{"name": "files__list", ',
    '"arguments": {"in": "a"}}',
    "\n</tool_call>",
    "<tool_call>\n",
    '{"name": "patch", "arguments": {"in',
    'put": "+ \\"x\\"\\n"}}',
    "\n</tool_call>",
]
ASK: dict[str, Any] = {"model": "org/fake", "input": "hi", "tools": TOOLS}


async def test_calls_are_reported_as_the_client_knows_them() -> None:
    service = FakeService(formats=AnswerFormats("hermes"), says=SAYS)
    async with client_of(service) as client:
        whole = await client.responses.create(**ASK)
        async with client.responses.stream(**ASK) as stream:
            events = [event async for event in stream]
        final = events[-1].response
        for response in (whole, final):
            one, two = response.output
            assert (one.type, one.namespace, one.name, json.loads(one.arguments)) == (
                "function_call",
                "files__",
                "list",
                {"in": "a"},
            )
            assert (two.type, two.name, two.input, two.status) == (
                "custom_tool_call",
                "patch",
                '+ "x"\n',
                "completed",
            )
            assert [tool.type for tool in response.tools] == ["namespace", "custom"]
        kinds = [event.type for event in events]
        assert kinds[-5:-1] == [
            "response.output_item.added",
            "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done",
            "response.output_item.done",
        ]
        assert events[-3].input == '+ "x"\n' == events[-4].delta
        turns = [
            {"role": "user", "content": "hi"},
            *[item.model_dump(exclude_none=True) for item in whole.output],
            {"type": "function_call_output", "call_id": one.call_id, "output": "a"},
            {"type": "custom_tool_call_output", "call_id": two.call_id, "output": "done"},
        ]
        await client.responses.create(**ASK | {"input": turns})
    prompt = service.requests[-1].prompt
    calls = [call["function"] for call in prompt.messages[1]["tool_calls"]]  # type: ignore[union-attr]
    assert calls == [
        {"name": "files__list", "arguments": {"in": "a"}},
        {"name": "patch", "arguments": {"input": '+ "x"\n'}},
    ]
    roles = [message["role"] for message in prompt.messages]  # type: ignore[union-attr]
    assert roles == ["user", "assistant", "tool", "tool"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "custom", "name": "patch"}, ["patch"]),
        ({"type": "function", "name": "list", "namespace": "files__"}, ["files__list"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "patch"}, {"type": "web_search"}],
            },
            ["patch"],
        ),
    ],
)
async def test_they_can_be_demanded(choice: Any, names: list[str]) -> None:
    service = FakeService(says=["[]"])
    async with client_of(service) as client:
        await client.responses.create(**ASK, tool_choice=choice)
    rule = service.requests[0].params.constraint
    if isinstance(rule, Calls):  # with the grammar of its text
        assert [form.begin.split('"')[3] for form in rule.forms] == names
    else:
        assert isinstance(rule, JsonSchema)
        assert [json.loads(rule.schema)["items"]["properties"]["name"]["const"]] == names


def test_tools_become_chat_tools() -> None:
    given = chat_tools(TOOLS)
    assert given[1]["custom"]["format"] == PATCH["format"]
    body = ChatBody(messages=[Message("user", "hi")], tools=given)
    functions = with_functions(body, custom_tools(given)).tools or []
    first, second = [tool["function"] for tool in functions]
    assert first == {"name": "files__list", "parameters": {"type": "object"}, "strict": False}
    assert (
        second["name"] == "patch"
        and second["description"] == "Changes files."
        and second["parameters"]["required"] == ["input"]
    )
    assert "start: LINE" in second["parameters"]["properties"]["input"]["description"]
    assert (
        set(by_model_name(TOOLS)) == {"files__list", "patch"}
        and model_name("f", "ns") == "ns__f"
        and model_name("f") == "f"
    )
    assert (
        chat_tools(None) == [] and chat_tools([{"type": "custom", "name": "c"}])[0]["custom"]["name"] == "c"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "a', '{"input": "a'),
        ('{"other": 1}', '{"other": 1}'),
        ("[1]", "[1]"),
        ("", ""),
    ],
)
def test_what_is_no_input_is_reported_as_it_stands(arguments: str, text: str) -> None:
    assert input_of(arguments) == text


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web_search"}, {"type": "local_shell"}], "tools[1].type"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
        (
            [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m"}]}],
            "tools[0].tools[0].type",
        ),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([{}], "tools[0].type"),
    ],
)
def test_refusals(tools: list[Any], param: str) -> None:
    with pytest.raises(Exception, match="tools") as error:
        check(tools)
    assert error.value.param == param  # type: ignore[attr-defined]

"""Tool calls and reasoning with the openai client, streaming and not, and what is refused."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import anyio
import jsonschema
import openai
import pytest

from runtime.errors import InvalidRequest
from runtime.http.app import http_app
from runtime.http.openai.completion_request import ChatBody, Message
from runtime.http.openai.stored_objects import StoredObjects
from runtime.http.openai.tools import required_calls, tools_of
from runtime.messages.constraint import JsonSchema
from runtime.messages.sampling import Free
from runtime.parsing.detect import AnswerFormats
from tests.http.fake import FakeService
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

HERMES = AnswerFormats(tool_calls="hermes", reasoning="qwen3")
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ASK: dict[str, Any] = {
    "model": "org/fake",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [ADD, NOW],
}
SAYS = [
    "<think>",
    "I ",
    "see",
    "</think>",
    "Well",
    ":",
    "\n",
    "<tool",
    "_call>",
    '{"name": "add", ',
    '"arguments": {"a"',
    ": 1}}",
    "</tool_call>",
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
]
THOUGHTS = 3  # tokens: the marker, and what was thought


@asynccontextmanager
async def client_of(service: FakeService) -> AsyncIterator[openai.AsyncOpenAI]:
    stored_objects = StoredObjects(service)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stored_objects.run)
        async with (
            serving(http_app(service, stored_objects=stored_objects)) as (host, port),
            openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="x", max_retries=0) as client,
        ):
            yield client
        tasks.cancel_scope.cancel()


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


@pytest.mark.parametrize("n", [1, 2])
async def test_calls_and_reasoning(n: int) -> None:
    async with client_of(FakeService(formats=HERMES, says=SAYS)) as client:
        # older clients join streams only where all tools are strict
        ask = ASK | {
            "tools": [tool | {"function": tool["function"] | {"strict": True}} for tool in (ADD, NOW)]
        }
        whole = await client.chat.completions.create(**ask, n=n, logprobs=True)
        async with client.chat.completions.stream(
            **ask, n=n, logprobs=True, stream_options={"include_usage": True}
        ) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        for choice in answer.choices:
            assert choice.message.content == "Well:" and choice.finish_reason == "tool_calls"
            assert calls(choice.message) == [("add", {"a": 1}), ("now", {})]
            assert len({call.id for call in choice.message.tool_calls}) == 2 and len(
                choice.logprobs.content
            ) == len(SAYS)
        assert answer.usage.completion_tokens_details.reasoning_tokens == n * THOUGHTS
    assert [choice.message.reasoning_content for choice in whole.choices] == ["I see"] * n
    assert streamed.usage == whole.usage


async def test_chunks_of_calls_and_reasoning() -> None:
    service = FakeService(formats=HERMES, says=SAYS, hold=True)
    async with client_of(service) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(_run, service)
        chunks = [
            chunk.choices[0] async for chunk in await client.chat.completions.create(**ASK, stream=True)
        ]
    deltas = [chunk.delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I see"
    assert "".join(delta.content or "" for delta in deltas) == "Well:"
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(p.index, p.function.name, p.type) for p in pieces if p.id] == [
        (0, "add", "function"),
        (1, "now", "function"),
    ]
    assert "".join(p.function.arguments for p in pieces if p.index == 0) == '{"a": 1}'
    assert [chunk.finish_reason for chunk in chunks[-2:]] == [None, "tool_calls"] and chunks[
        -1
    ].delta.tool_calls is None


async def _run(service: FakeService) -> None:
    while not service.running:
        await anyio.lowlevel.checkpoint()
    while service.running:
        service.step()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("fields", "content", "reasoning", "names"),
    [
        ({"parallel_tool_calls": False}, "Well:", "I see", ["add"]),
        ({"tool_choice": "none"}, "".join(SAYS[4:]), "I see", []),
        ({"extra_body": {"separate_reasoning": False}}, "<think>I see</think>Well:", None, ["add", "now"]),
        ({"extra_body": {"include_reasoning": False}}, "Well:", None, ["add", "now"]),
        ({"extra_body": {"stream_reasoning": False}}, "Well:", "I see", ["add", "now"]),
        ({"max_tokens": 2}, "", "I", []),
    ],
)
async def test_reasoning_and_content(
    fields: dict[str, Any], content: str, reasoning: str | None, names: list[str]
) -> None:
    async with client_of(FakeService(formats=HERMES, says=SAYS)) as client:
        message = (await client.chat.completions.create(**ASK, **fields)).choices[0].message
        stream = await client.chat.completions.create(**ASK, **fields, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert (message.content, getattr(message, "reasoning_content", None)) == (content, reasoning)
    assert [name for name, _ in calls(message)] == names
    streamed = [text for delta in deltas if (text := getattr(delta, "reasoning_content", None))]
    assert ("".join(streamed) or None, "".join(delta.content or "" for delta in deltas)) == (
        reasoning,
        content,
    )


async def test_a_demanded_call_is_a_list_of_calls_in_any_format() -> None:
    service = FakeService(says=['[{"name": "add", "argu', 'ments": {"a": 2}}]'])
    async with client_of(service) as client:
        for choice, several in (
            ("required", True),
            ({"type": "function", "function": {"name": "add"}}, None),
            ("required", None),
            ("any", None),  # Mistral's word for it
        ):
            more = {} if several is None else {"parallel_tool_calls": several}
            whole = await client.chat.completions.create(**ASK, tool_choice=choice, **more)
            assert (
                calls(whole.choices[0].message) == [("add", {"a": 2})]
                and whole.choices[0].message.content is None
            )
            assert whole.choices[0].finish_reason == "tool_calls"
    required, named, one, of_mistral = [
        json.loads(request.params.constraint.schema)  # type: ignore[union-attr]
        for request in service.requests
    ]
    assert of_mistral == one
    both = [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]
    jsonschema.validate(both, required)
    jsonschema.validate(both[:1], named)
    for call in both:
        jsonschema.validate([call], one)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(both, one)
    for wrong in ([], [{"name": "sub", "arguments": {}}], [{"name": "add", "arguments": {"a": "x"}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, required)
    for wrong in (both, both[1:]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, named)


async def test_constraints_apply_after_reasoning() -> None:
    service = FakeService(formats=AnswerFormats(reasoning="deepseek-v3"))
    explicit = FakeService(formats=AnswerFormats(reasoning="qwen3", is_explicit=True))
    special = FakeService(formats=AnswerFormats(tool_calls="mistral"))
    rule: dict[str, Any] = {
        "response_format": {"type": "json_object"},
        "extra_body": {"separate_reasoning": False},
    }
    for one, fields in ((service, rule), (explicit, {"tool_choice": "required"}), (special, {})):
        async with client_of(one) as client:
            await client.chat.completions.create(**ASK, **fields)
    params = [one.requests[0].params for one in (service, explicit, special)]
    begun, any_time = Free("</think>", "<think>"), Free("</think>")
    assert [p.constraint_after for p in params] == [(begun,), (begun, any_time), ""]
    assert all(p.skip_special_tokens for p in params)
    assert ["[TOOL_CALLS]" in one.requests[0].marks for one in (service, explicit, special)] == [
        False,
        False,
        True,
    ]


async def test_responses_and_messages_say_the_same() -> None:
    async with client_of(FakeService(formats=HERMES, says=SAYS)) as client:
        tools: Any = [{"type": "function"} | ADD["function"], {"type": "function"} | NOW["function"]]
        whole = await client.responses.create(model="org/fake", input="hi", tools=tools)
        async with client.responses.stream(model="org/fake", input="hi", tools=tools) as stream:
            events = [event async for event in stream]
        for response in (whole, events[-1].response):
            assert [item.type for item in response.output] == [
                "reasoning",
                "message",
                "function_call",
                "function_call",
            ]
            assert response.output[0].content[0].text == "I see" and response.output_text == "Well:"
            assert [(item.name, json.loads(item.arguments)) for item in response.output[2:]] == [
                ("add", {"a": 1}),
                ("now", {}),
            ]
            assert response.usage.output_tokens_details.reasoning_tokens == THOUGHTS
        turn = [
            {"role": "user", "content": "hi"},
            *[item.model_dump(exclude_none=True) for item in whole.output],
            *[
                {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
                for item in whole.output[2:]
            ],
        ]
        assert (
            await client.responses.create(model="org/fake", input=turn, tools=tools)
        ).status == "completed"
        async with anthropic.AsyncAnthropic(
            base_url=str(client.base_url).removesuffix("/v1/"), api_key="x", max_retries=0
        ) as other:
            message = await other.messages.create(
                model="org/fake",
                max_tokens=50,
                messages=[{"role": "user", "content": "hi"}],
                tools=[
                    {"name": "add", "input_schema": {"type": "object"}},
                    {"name": "now", "input_schema": {"type": "object"}},
                ],
            )
    assert [block.type for block in message.content] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ] and message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        (
            {
                "tool_choice": "required",
                "tools": [{"function": {"name": "f", "parameters": {"$defs": ["x"]}}}],
            },
            "tools",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"function": {"name": name, "parameters": {"$defs": {"x": {"type": kind}}}}}
                    for name, kind in (("f", "string"), ("g", "null"))
                ],
            },
            "tools",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], param: str) -> None:
    body = ChatBody(messages=[Message("user", "hi")], **{"tools": [ADD]} | fields)
    with pytest.raises(InvalidRequest) as error:
        required_calls(body, tools_of(body))
    assert error.value.param == param


async def test_allowed_tools_are_all_that_there_are() -> None:
    add = {"type": "function", "function": {"name": "add"}}
    seen = []
    for mode in ("auto", "required"):
        service = FakeService(formats=HERMES, says=["x"])
        flat: Any = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "add"}]}
        tools: Any = [{"type": "function"} | ADD["function"], {"type": "function"} | NOW["function"]]
        async with client_of(service) as client:
            choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [add]}}
            await client.chat.completions.create(**ASK, tool_choice=choice)
            response = await client.responses.create(
                model="org/fake", input="hi", tools=tools, tool_choice=flat
            )
            assert len(response.tools) == 2 and response.tool_choice.mode == mode, (
                "the answer shows what was asked"
            )
            for wrong in (
                {"mode": mode, "tools": [{"type": "function", "function": {"name": "sub"}}]},
                {"mode": "none", "tools": [add]},
                {"mode": mode, "tools": []},
                None,
            ):
                with pytest.raises(openai.BadRequestError) as error:
                    await client.chat.completions.create(**ASK, tool_choice=choice | {"allowed_tools": wrong})
                assert error.value.param == "tool_choice"
        assert [
            [tool["function"]["name"] for tool in request.prompt.tools or ()] for request in service.requests
        ] == [["add"]] * 2  # type: ignore
        seen += [request.params.constraint is not None for request in service.requests]
    assert seen == [False, False, True, True]


def test_definitions_move_to_the_root() -> None:
    parameters = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}},
        "required": ["p"],
        "$defs": {"point": {"type": "object", "required": ["x"]}},
    }
    body = ChatBody(
        messages=[Message("user", "hi")],
        tools=[{"function": {"name": "f", "parameters": parameters}}],
        tool_choice="required",
    )
    rule = required_calls(body, tools_of(body))
    assert isinstance(rule, JsonSchema)
    schema = json.loads(rule.schema)
    jsonschema.validate([{"name": "f", "arguments": {"p": {"x": 1}}}], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "f", "arguments": {"p": {}}}], schema)

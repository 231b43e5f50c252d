"""What tools make of the form of an answer: calls in the model's own format, an answer, or either."""

import json
from typing import Any

import anyio
import httpx
import pytest

from runtime.http.app import http_app
from runtime.http.openai.stored_objects import StoredObjects
from runtime.messages.constraint import AnyText, Calls, JsonObject, JsonSchema
from runtime.messages.sampling import Free
from runtime.parsing.detect import AnswerFormats
from tests.http.fake import FakeService
from tests.http.openai.test_tools import ADD, ASK, HERMES, NOW, SAYS, client_of

pytestmark = pytest.mark.anyio


async def test_strict_functions_keep_to_their_schemas_where_the_backend_can() -> None:
    tools = [{"type": "function", "function": ADD["function"] | {"strict": True}}, NOW]
    asked = []
    for has_grammars, fields in (
        (True, {}),
        (True, {"parallel_tool_calls": False}),
        (False, {}),
        (True, {"tools": [ADD]}),
        (True, {"tool_choice": "none"}),
        (True, {"response_format": {"type": "json_object"}}),
    ):
        service = FakeService(formats=HERMES, says=SAYS, has_grammars=has_grammars)
        async with client_of(service) as client:
            await client.chat.completions.create(**ASK | {"tools": tools} | fields)
        asked.append(service.requests[0].params.constraint)
    first, second = asked[:2]
    assert isinstance(first, Calls) and isinstance(second, Calls)
    assert first.trigger == "<tool_call>" and first.answer == AnyText()
    assert [json.loads(form.arguments.schema) for form in first.forms] == [
        ADD["function"]["parameters"],
        {"type": "object"},
    ]
    assert first.forms[0].begin == '<tool_call>\n{"name": "add", "arguments": '
    assert (first.is_single, second.is_single) == (False, True)
    assert asked[2:5] == [None, None, None]
    assert isinstance(asked[5], Calls) and asked[5].answer == JsonObject()


SCHEMA: Any = {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"]}
FORMAT: Any = {"type": "json_schema", "name": "answer", "schema": SCHEMA}


async def test_tools_and_a_schema_make_one_grammar_on_every_route() -> None:
    """A call in the model's own format or an answer; the same for all APIs."""
    service = FakeService(formats=HERMES, says=SAYS, has_grammars=True)
    function, chat = ADD["function"], {"messages": [{"role": "user", "content": "hi"}], "model": "default"}
    claude = {"name": "add", "input_schema": function["parameters"]}
    wrapped = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    plain: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat | {"tools": [ADD], "response_format": wrapped}),
        ("/v1/chat/completions", chat | {"tools": [ADD], "guided_json": SCHEMA, "tool_choice": "auto"}),
        (
            "/v1/responses",
            {"input": "hi", "tools": [function | {"type": "function"}], "text": {"format": FORMAT}},
        ),
        ("/v1/messages", chat | {"max_tokens": 9, "tools": [claude], "output_config": plain}),
        ("/v1/messages", chat | {"max_tokens": 9, "tools": [claude], "output_format": plain["format"]}),
        ("/api/chat", chat | {"tools": [ADD], "format": SCHEMA, "stream": False}),
    ]
    stored_objects = StoredObjects(service)
    async with (
        httpx.AsyncClient(
            transport=httpx.ASGITransport(http_app(service, stored_objects=stored_objects)),
            base_url="http://test",
        ) as http,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(stored_objects.run)
        for path, body in bodies:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            rule = service.requests[-1].params.constraint
            assert isinstance(rule, Calls) and isinstance(rule.answer, JsonSchema), path
            assert json.loads(rule.answer.schema) == SCHEMA and not rule.is_single
            assert [form.begin for form in rule.forms] == ['<tool_call>\n{"name": "add", "arguments": ']
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_a_required_call_wins_over_the_form_of_an_answer(choice: Any) -> None:
    """Some clients send response_format with every request."""
    service = FakeService(
        formats=HERMES, says=['[{"name": "add", "arguments": {"a": 1}}]'], has_grammars=True
    )
    wrapped = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    async with client_of(service) as client:
        for stream in (False, True):
            await client.chat.completions.create(
                **ASK, tool_choice=choice, response_format=wrapped, stream=stream
            )
            rule = service.requests[-1].params.constraint
            assert isinstance(rule, JsonSchema) and json.loads(rule.schema)["minItems"] == 1
        flat = choice if isinstance(choice, str) else {"type": "function", "name": "add"}
        response = await client.responses.create(
            model="org/fake",
            input="hi",
            tools=[ADD["function"] | {"type": "function", "strict": None}],
            tool_choice=flat,
            text={"format": FORMAT},
        )
        assert [item.type for item in response.output] == ["function_call"]
        rule = service.requests[-1].params.constraint
        assert isinstance(rule, JsonSchema) and json.loads(rule.schema)["minItems"] == 1


async def test_a_model_that_reasons_first_calls_or_answers_behind_its_reasoning() -> None:
    service = FakeService(
        formats=AnswerFormats(tool_calls="hermes", reasoning="deepseek-r1"), has_grammars=True
    )
    async with client_of(service) as client:
        await client.chat.completions.create(**ASK, response_format={"type": "json_object"})
    params = service.requests[0].params
    assert isinstance(params.constraint, Calls) and Free("</think>") in params.free

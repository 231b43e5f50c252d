"""Tool calls, reasoning and what else completions can ask for, with the openai client and the embedded
model."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.e2e.serving import Server, serve

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
ASK: dict[str, Any] = {
    "model": "pocket",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "temperature": 0,
    "max_completion_tokens": 200,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--model-path", "pocket", "--constrained-json-disable-any-whitespace") as running:
        yield running


def parts_of(message: Any) -> tuple[Any, ...]:
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    return message.content or "", getattr(message, "reasoning_content", None), calls


def streamed(server: Server, **fields: Any) -> tuple[Any, ...]:
    content, reasoning, names, arguments = "", "", [], []
    for chunk in server.client.chat.completions.create(**ASK | fields, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            if call.id:
                names.append(call.function.name)
                arguments.append("")
            arguments[call.index] += call.function.arguments
    return (
        content,
        reasoning or None,
        [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)],
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_demanded_call_keeps_to_the_schema(server: Server, choice: Any) -> None:
    fields = {"tools": [WEATHER, TIME], "tool_choice": choice, "parallel_tool_calls": False}
    answer = server.client.chat.completions.create(**ASK | fields).choices[0]
    content, _, calls = parts_of(answer.message)
    assert answer.finish_reason == "tool_calls" and calls and not content
    for name, arguments in calls:
        jsonschema.validate(
            arguments, {"get_weather": WEATHER, "get_time": TIME}[name]["function"]["parameters"]
        )
    assert streamed(server, **fields) == parts_of(answer.message)


def test_a_strict_function_keeps_to_its_schema_where_the_model_calls_it_by_itself(server: Server) -> None:
    """Its days are many, which the model does not know; reasoning and text come before the call as the model
    likes."""
    schema = WEATHER["function"]["parameters"]
    days = {"type": "integer", "minimum": 41, "maximum": 49}
    tool = {
        "type": "function",
        "function": WEATHER["function"]
        | {"strict": True, "parameters": schema | {"properties": schema["properties"] | {"days": days}}},
    }
    for effort in ("none", "high"):
        fields = {"tools": [tool, TIME], "reasoning_effort": effort, "parallel_tool_calls": False}
        content, reasoning, calls = parts_of(
            server.client.chat.completions.create(**ASK | fields).choices[0].message
        )
        assert (
            calls
            and calls[0][0] == "get_weather"
            and 41 <= calls[0][1]["days"] <= 49
            and bool(reasoning) == (effort == "high")
        )
        assert streamed(server, **fields) == (content, reasoning, calls)
    assert not parts_of(
        server.client.chat.completions.create(
            **ASK | {"tools": [tool], "messages": [{"role": "user", "content": "Count from 1 to 5."}]}
        )
        .choices[0]
        .message
    )[2]


SCORE: Any = {
    "type": "object",
    "properties": {"score": {"type": "integer", "minimum": 10, "maximum": 19}},
    "required": ["score"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("effort", ["none", "high"])
def test_tools_and_a_schema_are_a_call_or_an_answer_in_the_schema(server: Server, effort: str) -> None:
    """As agents with an output type ask: first a call, then the answer."""
    form = {"type": "json_schema", "json_schema": {"name": "score", "schema": SCORE}}
    fields: dict[str, Any] = {
        "tools": [WEATHER, TIME],
        "response_format": form,
        "reasoning_effort": effort,
        "max_completion_tokens": 300,
    }
    answer = server.client.chat.completions.create(**ASK | fields).choices[0]
    content, reasoning, calls = parts_of(answer.message)
    assert answer.finish_reason == "tool_calls" and not content and len(calls) == 1
    jsonschema.validate(calls[0][1], WEATHER["function"]["parameters"])
    assert streamed(server, **fields) == (content, reasoning, calls)
    fields["messages"] = [{"role": "user", "content": "Count from 1 to 5."}]
    for n in (1, 2):
        counted = server.client.chat.completions.create(
            **ASK | fields | {"n": n, "temperature": 0.5, "seed": 3}
        )
        for choice in counted.choices:
            content, reasoning, calls = parts_of(choice.message)
            if calls:
                jsonschema.validate(
                    calls[0][1],
                    {"get_weather": WEATHER, "get_time": TIME}[calls[0][0]]["function"]["parameters"],
                )
            else:
                jsonschema.validate(json.loads(content), SCORE)


@pytest.mark.parametrize(
    ("fields", "thinks", "calls"),
    [
        ({"tools": [WEATHER]}, False, ["get_weather"]),
        ({"reasoning_effort": "high"}, True, []),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, True, []),
        ({"tools": [TIME], "reasoning_effort": "high"}, True, ["get_time"]),
        ({"reasoning_effort": "none"}, False, []),
    ],
)
def test_what_the_model_does_by_itself(
    server: Server, fields: dict[str, Any], thinks: bool, calls: list[str]
) -> None:
    answer = server.client.chat.completions.create(**ASK | fields)
    content, reasoning, called = parts_of(answer.choices[0].message)
    assert streamed(server, **fields) == (content, reasoning, called)
    assert (bool(reasoning), [name for name, _ in called]) == (thinks, calls)
    assert (answer.usage.completion_tokens_details.reasoning_tokens > 0) == thinks
    assert answer.choices[0].finish_reason == ("tool_calls" if calls else "stop")


def test_completions_as_evaluations_ask_for_them(server: Server) -> None:
    """Log probabilities of a prompt and nothing else; and the likeliest of several."""
    ask: dict[str, Any] = {"model": "pocket", "prompt": ["Hello there", "Once upon a time"]}
    scored = server.client.completions.create(**ask, echo=True, max_tokens=0, logprobs=2)
    assert [choice.text for choice in scored.choices] == ask["prompt"] and scored.usage.completion_tokens == 0
    for choice in scored.choices:
        assert choice.logprobs.token_logprobs[0] is None and all(
            value <= 0 for value in choice.logprobs.token_logprobs[1:]
        )
        assert "".join(choice.logprobs.tokens) == choice.text
    completion = server.client.completions.create(
        **ask, max_tokens=6, extra_body={"return_token_ids": True, "prompt_logprobs": 1}
    )
    again = server.client.completions.create(
        model="pocket", prompt=[completion.choices[0].prompt_token_ids], max_tokens=1
    )
    assert (
        again.usage.prompt_tokens
        == len(completion.choices[0].prompt_logprobs)
        == len(completion.choices[0].prompt_token_ids)
    )
    every = server.client.completions.create(
        **ask | {"prompt": "Once"}, n=3, seed=5, max_tokens=6, logprobs=0
    )
    best = server.client.completions.create(**ask | {"prompt": "Once"}, best_of=3, seed=5, max_tokens=6)
    means = [
        sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs) for choice in every.choices
    ]
    assert best.choices[0].text == every.choices[means.index(max(means))].text

"""Tools and reasoning of the embedded model through Anthropic's and Ollama's clients, streaming and not."""

from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import pytest

from tests.e2e.serving import Server, serve

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "get_weather", "description": "Weather of a city", "input_schema": CITY}
FUNCTION: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": CITY},
}
WEATHER: Any = {"role": "user", "content": "What is the weather in Paris?"}
SUM: Any = {"role": "user", "content": "What is 3 plus 4?"}
RESULT = '{"temperature": 7, "sky": "rain"}'
ASK: dict[str, Any] = {"model": "default", "max_tokens": 80, "extra_body": {"temperature": 0}}
OPTIONS = {"temperature": 0, "num_predict": 80}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--dtype", "float32") as running:
        yield running


@pytest.fixture
def api(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def lines(server: Server) -> Iterator[ollama.Client]:
    client = ollama.Client(host=server.url)
    yield client
    client.close()


def plain(message: Any) -> list[dict[str, Any]]:
    """The blocks of a message, without the ids that are drawn for each call."""
    fields = ("type", "text", "thinking", "name", "input")
    return [
        {name: getattr(block, name) for name in fields if getattr(block, name, None) is not None}
        for block in message.content
    ]


def test_anthropics_loop_of_tools(api: anthropic.Anthropic) -> None:
    asked = api.messages.create(messages=[WEATHER], tools=[TOOL], **ASK)
    assert asked.stop_reason == "tool_use" and plain(asked)[-1] == {
        "type": "tool_use",
        "name": "get_weather",
        "input": {"city": "Paris"},
    }
    with api.messages.stream(messages=[WEATHER], tools=[TOOL], **ASK) as stream:
        streamed = stream.get_final_message()
    assert (plain(streamed), streamed.stop_reason, streamed.usage.output_tokens) == (
        plain(asked),
        asked.stop_reason,
        asked.usage.output_tokens,
    )
    result = {
        "type": "tool_result",
        "tool_use_id": asked.content[-1].id,
        "content": [{"type": "text", "text": RESULT}],
    }
    turns: Any = [
        WEATHER,
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [result]},
    ]
    answer = api.messages.create(messages=turns, tools=[TOOL], **ASK)
    assert answer.stop_reason == "end_turn" and "7 degrees" in answer.content[0].text
    assert answer.usage.cache_read_input_tokens > 0
    counted = api.messages.count_tokens(model="default", messages=turns, tools=[TOOL])
    assert counted.input_tokens == answer.usage.cache_read_input_tokens + answer.usage.input_tokens


def test_anthropics_reasoning_is_in_blocks_of_its_own(api: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 40}
    whole = api.messages.create(messages=[SUM], thinking=thinking, **ASK)
    assert [block.type for block in whole.content] == ["thinking", "text"] and whole.content[
        1
    ].text.strip() == "7"
    with api.messages.stream(messages=[SUM], thinking=thinking, **ASK) as stream:
        assert plain(stream.get_final_message()) == plain(whole)
    assert [block.type for block in api.messages.create(messages=[SUM], **ASK).content] == ["text"]


def test_anthropics_call_that_is_demanded(api: anthropic.Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    asked = api.messages.create(messages=[WEATHER], tools=[TOOL], tool_choice=choice, **ASK)
    assert asked.content[0].type == "tool_use" and isinstance(asked.content[0].input.get("city"), str)
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        api.messages.create(
            messages=[WEATHER], tools=[TOOL], tool_choice={"type": "tool", "name": "other"}, **ASK
        )


def test_anthropics_prefill_goes_on(api: anthropic.Anthropic) -> None:
    whole = api.messages.create(messages=[SUM, {"role": "assistant", "content": "The answer is"}], **ASK)
    assert whole.content and not whole.content[0].text.startswith("The answer")


def test_ollamas_tools_and_reasoning(lines: ollama.Client) -> None:
    asked = lines.chat("default", [WEATHER], tools=[FUNCTION], options=OPTIONS)
    assert asked.message.tool_calls is not None
    call = asked.message.tool_calls[0].function
    assert (call.name, call.arguments, asked.done_reason) == ("get_weather", {"city": "Paris"}, "stop")
    streamed = [
        line.message
        for line in lines.chat("default", [WEATHER], tools=[FUNCTION], options=OPTIONS, stream=True)
    ]
    assert [c.function.arguments for message in streamed for c in message.tool_calls or ()] == [
        {"city": "Paris"}
    ]
    result = {"role": "tool", "content": RESULT, "tool_name": "get_weather"}
    answer = lines.chat("default", [WEATHER, asked.message, result], tools=[FUNCTION], options=OPTIONS)
    assert "7 degrees" in (answer.message.content or "")
    thought = lines.chat("default", [SUM], think=True, options=OPTIONS).message
    assert thought.thinking and (thought.content or "").strip() == "7"
    pieces = [
        line for line in lines.generate("default", SUM["content"], think=True, options=OPTIONS, stream=True)
    ]
    assert "".join(line.thinking or "" for line in pieces) == thought.thinking
    assert not lines.chat("default", [SUM], think=False, options=OPTIONS).message.thinking


def test_ollamas_formats_and_capabilities(lines: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
    }
    answer = lines.chat("default", [SUM], format=schema, options=OPTIONS).message.content or ""
    assert '"n"' in answer
    assert lines.show("default").capabilities == ["completion", "tools", "thinking"]

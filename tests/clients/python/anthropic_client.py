"""anthropic's client: messages, streams, tools, parsed answers, counted tokens, errors."""

# /// script
# dependencies = ["anthropic==2.12.0"]
# ///

import os
from typing import Any

import anthropic
from pydantic import BaseModel

COUNT: Any = [{"role": "user", "content": "Count from 1 to 5."}]
ASK: Any = {"model": "pocket", "max_tokens": 100, "messages": COUNT, "extra_body": {"temperature": 0}}
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}

client = anthropic.Anthropic(base_url=os.environ["RUNTIME_URL"], api_key="none", max_retries=0)
assert client.models.list().data[0].id == "pocket"


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


whole = client.messages.create(**ASK)
assert text(whole) == "1, 2, 3, 4, 5" and whole.stop_reason == "end_turn"
print("ok: messages")

with client.messages.stream(**ASK, system="Be brief.") as stream:
    assert "".join(stream.text_stream)
    final = stream.get_final_message()
assert final.usage.output_tokens > 0
print("ok: stream helper")

question: Any = {"role": "user", "content": "What is the weather in Oslo?"}
called = client.messages.create(**ASK | {"messages": [question]}, tools=[TOOL], tool_choice={"type": "any"})
call = next(block for block in called.content if block.type == "tool_use")
assert called.stop_reason == "tool_use" and call.name == "get_weather" and "city" in call.input
result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
answered = client.messages.create(
    **ASK
    | {
        "messages": [
            question,
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ]
    },
    tools=[TOOL],
)
assert answered.content
print("ok: tools and their results")


asked: list[str] = []


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The name of the city.
    """
    asked.append(city)
    return "21 degrees, clear"


runner = client.beta.messages.tool_runner(
    **ASK | {"messages": [question]}, tools=[get_weather], max_iterations=3
)
assert text(runner.until_done()) and asked == ["Oslo"]
print("ok: tool_runner")


class Review(BaseModel):
    stars: int


assert isinstance(client.messages.parse(**ASK, output_format=Review).parsed_output, Review)
print("ok: parse")

count = client.messages.count_tokens(model="pocket", messages=COUNT, tools=[TOOL])
assert count.input_tokens > whole.usage.input_tokens
print("ok: count_tokens")

try:
    client.messages.create(**ASK | {"extra_body": {"temperature": -1}})
except anthropic.BadRequestError as refusal:
    assert "temperature" in str(refusal)
else:
    raise AssertionError("temperature -1 was not refused")
print("ok: errors")

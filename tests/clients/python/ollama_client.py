"""ollama's client: chat, generate, streams, tools, formats, model lists."""

# /// script
# dependencies = ["ollama==0.6.3"]
# ///

import os
from typing import Any

import ollama
from pydantic import BaseModel

COUNT: Any = [{"role": "user", "content": "Count from 1 to 5."}]
EXACT = {"temperature": 0, "num_ctx": 2048}

client = ollama.Client(host=os.environ["RUNTIME_URL"])
assert [model.model for model in client.list().models] == ["pocket"]
assert client.show("pocket").capabilities and client.ps().models
print("ok: list, show, ps")

whole = client.chat("pocket", messages=COUNT, options=EXACT, think=False)
assert whole.message.content == "1, 2, 3, 4, 5" and whole.done_reason == "stop"
parts = list(client.chat("pocket", messages=COUNT, options=EXACT, think=False, stream=True))
assert "".join(part.message.content or "" for part in parts) == "1, 2, 3, 4, 5" and parts[-1].done
print("ok: chat, whole and streamed")

assert client.generate("pocket", "Count from 1 to 5.", options=EXACT).response
print("ok: generate")


class Review(BaseModel):
    stars: int


answer = client.chat("pocket", messages=COUNT, format=Review.model_json_schema())
Review.model_validate_json(answer.message.content or "")
print("ok: format")


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
      city: The name of the city.
    """
    return f"21 degrees in {city}"


messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
called = client.chat("pocket", messages=messages, tools=[get_weather], options=EXACT, think=False)
assert called.message.tool_calls and called.message.tool_calls[0].function.name == "get_weather"
messages += [
    called.message,
    {
        "role": "tool",
        "tool_name": "get_weather",
        "content": get_weather(**called.message.tool_calls[0].function.arguments),
    },
]
assert client.chat(
    "pocket", messages=messages, tools=[get_weather], options=EXACT, think=False
).message.content
print("ok: tools from functions, and their results")

try:
    client.chat("none", messages=COUNT)
except ollama.ResponseError as refusal:
    assert refusal.status_code == 404
else:
    raise AssertionError("a model that is not served was not refused")
print("ok: errors")

"""Mistral's client: chat, streams, tools, parsed answers."""

# /// script
# dependencies = ["mistralai==1.9.11"]
# ///

import os
from typing import Any

from mistralai import Mistral
from pydantic import BaseModel

COUNT: Any = {
    "model": "pocket",
    "messages": [{"role": "user", "content": "Count from 1 to 5."}],
    "temperature": 0,
    "max_tokens": 200,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Review(BaseModel):
    stars: int


client = Mistral(api_key="none", server_url=os.environ["RUNTIME_URL"])
assert client.chat.complete(**COUNT).choices[0].message.content == "1, 2, 3, 4, 5"
parts = [event.data.choices[0].delta.content or "" for event in client.chat.stream(**COUNT)]
assert "".join(parts) == "1, 2, 3, 4, 5"
print("ok: chat, stream")
weather = COUNT | {"messages": [{"role": "user", "content": "What is the weather in Oslo?"}], "tools": [TOOL]}
assert client.chat.complete(**weather, tool_choice="any").choices[0].message.tool_calls
print("ok: tools, tool_choice any")
assert isinstance(client.chat.parse(response_format=Review, **COUNT).choices[0].message.parsed, Review)
print("ok: parse")

"""huggingface_hub's InferenceClient: chats, streams, tools, schemas, text generation."""

# /// script
# dependencies = ["huggingface_hub==2.4.0"]
# ///

import json
import os
from typing import Any

from huggingface_hub import InferenceClient

URL = os.environ["RUNTIME_URL"]
COUNT: Any = {
    "model": "pocket",  # else the client sends "dummy"
    "messages": [{"role": "user", "content": "Count from 1 to 5."}],
    "temperature": 0,
    "max_tokens": 100,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": CITY},
}

client = InferenceClient(base_url=URL + "/v1", api_key="none")
assert client.chat_completion(**COUNT).choices[0].message.content == "1, 2, 3, 4, 5"
parts = list(client.chat_completion(**COUNT, stream=True))
assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "1, 2, 3, 4, 5"
print("ok: chat_completion, streamed")

weather = COUNT | {"messages": [{"role": "user", "content": "What is the weather in Oslo?"}]}
called = client.chat_completion(**weather, tools=[TOOL], tool_choice="auto")
assert called.choices[0].message.tool_calls
print("ok: tools")

schema = {"type": "object", "properties": {"stars": {"type": "integer"}}, "required": ["stars"]}
typed = client.chat_completion(
    **COUNT, response_format={"type": "json_schema", "json_schema": {"name": "review", "schema": schema}}
)
assert json.loads(typed.choices[0].message.content or "").keys() == {"stars"}
print("ok: response_format")

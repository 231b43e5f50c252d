"""An agent in its smallest form: the model asks for a tool, gets the result, and answers."""

import json
import os
from typing import Any

from openai import OpenAI

url = os.environ.get("RUNTIME_URL", "http://127.0.0.1:30000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("RUNTIME_API_KEY", "none"))
model = client.models.list().data[0].id


def get_weather(city: str) -> dict[str, Any]:
    """What a real tool would look up."""
    return {"city": city, "celsius": 21, "sky": "clear"}


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 40}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]

messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
for turn in range(4):
    # the first turn demands a call; small models may not think of it by themselves
    choice = "required" if turn == 0 else "none"
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
        max_completion_tokens=120,
    )
    message = answer.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        print("answer:", message.content)
        break
    for call in message.tool_calls:
        result = get_weather(**json.loads(call.function.arguments))
        print(f"tool: {call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})

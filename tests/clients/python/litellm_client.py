"""litellm through every API that it knows of this server: answers, streams, tools, schemas, errors."""

# /// script
# dependencies = ["litellm==1.106.2", "mcp==2.3.0"]
# ///

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for one on the net

import litellm
from pydantic import BaseModel

URL = os.environ["RUNTIME_URL"]
COUNT = [{"role": "user", "content": "Count from 1 to 5."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Review(BaseModel):
    stars: int


for model, base in {
    "openai/pocket": URL + "/v1",
    "hosted_vllm/pocket": URL + "/v1",
    "anthropic/pocket": URL,
    "ollama_chat/pocket": URL,
}.items():
    ask: dict[str, Any] = {
        "model": model,
        "api_base": base,
        "api_key": "none",
        "messages": COUNT,
        "temperature": 0,
        "max_tokens": 200,
        "num_retries": 0,
    }
    assert litellm.completion(**ask).choices[0].message.content == "1, 2, 3, 4, 5"
    chunks = list(litellm.completion(**ask, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "1, 2, 3, 4, 5"
    weather = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = litellm.completion(**ask | {"messages": weather}, tools=[TOOL])
    assert called.choices[0].message.tool_calls[0].function.name == "get_weather"
    typed = litellm.completion(**ask, response_format=Review)
    Review.model_validate_json(typed.choices[0].message.content)
    print(f"ok: {model}: completion, stream, tools, response_format")

for model, base in {"text-completion-openai/pocket": URL + "/v1", "ollama/pocket": URL}.items():
    ask = {"model": model, "api_base": base, "api_key": "none", "messages": COUNT, "max_tokens": 9}
    assert litellm.completion(**ask).choices[0].message.content
    assert list(litellm.completion(**ask, stream=True))
    print(f"ok: {model}: completion, stream")

for model, base in {"openai/pocket": URL + "/v1", "anthropic/pocket": URL}.items():
    try:
        litellm.completion(
            model=model,
            api_base=base,
            api_key="none",
            messages=COUNT,
            max_tokens=9,
            temperature=-5,
            num_retries=0,
        )
    except litellm.BadRequestError:
        print(f"ok: {model}: errors")
    else:
        raise AssertionError("temperature -5 was not refused")

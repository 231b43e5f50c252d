"""openai's client, sync and async: chat, responses, completions, tools, parsed answers, files, batches."""

# /// script
# dependencies = ["openai==3.54.0"]
# ///

import asyncio
import json
import os
import time
from typing import Any, Literal

import openai
from pydantic import BaseModel

URL = os.environ["RUNTIME_URL"] + "/v1"
COUNT: Any = [{"role": "user", "content": "Count from 1 to 5."}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]


class Review(BaseModel):
    verdict: Literal["good", "bad"]
    stars: int


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str


client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
assert client.models.retrieve("pocket").id == "pocket"

chat = client.chat.completions.create(model="pocket", messages=COUNT, temperature=0, logprobs=True)
assert chat.choices[0].message.content == "1, 2, 3, 4, 5" and chat.choices[0].finish_reason == "stop"
assert chat.usage and chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
print("ok: chat")

with client.chat.completions.stream(model="pocket", messages=COUNT, temperature=0) as stream:
    kinds = [event.type for event in stream]
    assert stream.get_final_completion().choices[0].message.content == "1, 2, 3, 4, 5"
assert "content.delta" in kinds and kinds[-1] == "content.done"
print("ok: chat stream helper")

parsed = client.chat.completions.parse(model="pocket", messages=COUNT, response_format=Review, temperature=0)
assert isinstance(parsed.choices[0].message.parsed, Review)
print("ok: chat parse")

tools: Any = [openai.pydantic_function_tool(GetWeather)]
called = client.chat.completions.parse(
    model="pocket", messages=WEATHER, tools=tools, tool_choice="required", temperature=0
)
assert called.choices[0].message.tool_calls is not None
assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, GetWeather)
print("ok: chat tools parsed")

response = client.responses.create(model="pocket", input="Count from 1 to 5.", temperature=0)
assert response.output_text == "1, 2, 3, 4, 5"
again = client.responses.create(
    model="pocket", input="Count from 2 to 4.", previous_response_id=response.id, temperature=0
)
assert again.output_text == "2, 3, 4" and client.responses.retrieve(again.id).id == again.id
print("ok: responses, continued, retrieved")

with client.responses.stream(model="pocket", input="Count from 1 to 5.", text_format=Review) as events:
    for _ in events:
        pass
    assert isinstance(events.get_final_response().output_parsed, Review)
print("ok: responses stream helper, parsed")

text = client.completions.create(model="pocket", prompt="Once upon a time", max_tokens=5)
assert text.choices[0].text and text.usage and text.usage.completion_tokens == 5
print("ok: completions")

lines = [
    {
        "custom_id": f"line-{i}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "pocket", "messages": COUNT, "temperature": 0},
    }
    for i in range(2)
]
file = client.files.create(
    file=("lines.jsonl", "\n".join(json.dumps(line) for line in lines).encode()), purpose="batch"
)
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.1)
    batch = client.batches.retrieve(batch.id)
assert batch.output_file_id, batch
answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
assert {answer["custom_id"] for answer in answers} == {"line-0", "line-1"}
print("ok: files, batches")

for wrong, error in (("temperature", openai.BadRequestError), ("model", openai.NotFoundError)):
    try:
        client.chat.completions.create(
            messages=COUNT,
            **{"model": "pocket", "temperature": -5.0} if wrong == "temperature" else {"model": "none"},
        )
    except error as refusal:
        assert refusal.param == wrong, refusal
    else:
        raise AssertionError(f"{wrong} was not refused")
print("ok: errors")


async def together() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as many:
        answers = await asyncio.gather(
            *(many.chat.completions.create(model="pocket", messages=COUNT, temperature=0) for _ in range(4))
        )
        assert {answer.choices[0].message.content for answer in answers} == {"1, 2, 3, 4, 5"}


asyncio.run(together())
print("ok: async, 4 at once")

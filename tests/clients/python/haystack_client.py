"""Haystack: a chat generator, whole, streamed, typed, and in an agent with a tool."""

# /// script
# dependencies = ["haystack-ai==3.4.0"]
# ///

import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel

COUNT = [ChatMessage.from_user("Count from 1 to 5.")]
asked: list[str] = []


class Review(BaseModel):
    stars: int


@tool
def get_weather(city: Annotated[str, "The name of the city"]) -> str:
    """The weather in a city."""
    asked.append(city)
    return "21 degrees, clear"


def generator(**options: object) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        model="pocket",
        api_base_url=os.environ["RUNTIME_URL"] + "/v1",
        api_key=Secret.from_token("none"),
        max_retries=0,
        generation_kwargs={"temperature": 0, "max_tokens": 200, **options},
    )


assert generator().run(COUNT)["replies"][0].text == "1, 2, 3, 4, 5"
parts: list[str] = []
generator().run(COUNT, streaming_callback=lambda chunk: parts.append(chunk.content))
assert "".join(parts) == "1, 2, 3, 4, 5"
Review.model_validate_json(generator(response_format=Review).run(COUNT)["replies"][0].text or "")
print("ok: run, streaming_callback, response_format")
agent = Agent(chat_generator=generator(), tools=[get_weather])
assert agent.run(messages=[ChatMessage.from_user("What is the weather in Oslo?")])["last_message"] and asked
print("ok: Agent with a tool")

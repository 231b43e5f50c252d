"""Agno over OpenAI's, Anthropic's and Ollama's APIs: an agent, streamed, typed, with a tool."""

# /// script
# dependencies = ["agno==3.1.10", "openai==3.54.0", "anthropic==2.12.0", "ollama==0.6.3"]
# ///

import os
from typing import Any

from agno.agent import Agent
from agno.models.anthropic import Claude
from agno.models.ollama import Ollama
from agno.models.openai import OpenAIChat, OpenAIResponses
from pydantic import BaseModel

URL = os.environ["RUNTIME_URL"]
asked: list[str] = []


class Review(BaseModel):
    stars: int


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The name of the city.
    """
    asked.append(city)
    return "21 degrees, clear"


MODELS: list[Any] = [
    OpenAIChat(id="pocket", base_url=URL + "/v1", api_key="none", temperature=0, max_tokens=200),
    OpenAIResponses(id="pocket", base_url=URL + "/v1", api_key="none", temperature=0, max_output_tokens=200),
    Claude(id="pocket", api_key="none", max_tokens=200, client_params={"base_url": URL}),
    Ollama(id="pocket", host=URL, options={"temperature": 0, "num_predict": 200}),
]
for model in MODELS:
    agent = Agent(model=model, telemetry=False, system_message="Be brief.")
    assert agent.run("Count from 1 to 5.").content
    assert [event.content for event in agent.run("Count from 1 to 5.", stream=True)]
    asked.clear()
    agent = Agent(model=model, telemetry=False, tools=[get_weather], system_message="Be brief.")
    assert agent.run("What is the weather in Oslo?").content and asked
    print(f"ok: {type(model).__name__}: run, stream, tool")
typed = Agent(model=MODELS[0], telemetry=False, output_schema=Review)
assert isinstance(typed.run("A review of a phone.").content, Review)
print("ok: output_schema")

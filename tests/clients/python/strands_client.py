"""Strands Agents over OpenAI's, Anthropic's and Ollama's APIs: an agent with a tool, typed answers."""

# /// script
# dependencies = ["strands-agents[openai,ollama,anthropic]==1.62.0"]
# ///

import os
from typing import Any

from pydantic import BaseModel
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.ollama import OllamaModel
from strands.models.openai import OpenAIModel

URL = os.environ["RUNTIME_URL"]
asked: list[str] = []


class Review(BaseModel):
    """A review of a product."""

    stars: int


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The name of the city.
    """
    asked.append(city)
    return "21 degrees, clear"


MODELS: list[Any] = [
    OpenAIModel(
        client_args={"base_url": URL + "/v1", "api_key": "none"},
        model_id="pocket",
        params={"temperature": 0, "max_tokens": 200},
    ),
    AnthropicModel(client_args={"base_url": URL, "api_key": "none"}, model_id="pocket", max_tokens=200),
    OllamaModel(URL, model_id="pocket", temperature=0, max_tokens=200),
]
for model in MODELS:
    agent = Agent(model=model, callback_handler=None, system_prompt="Be brief.")
    assert str(agent("Count from 1 to 5.")).strip()
    asked.clear()
    agent = Agent(model=model, tools=[get_weather], callback_handler=None)
    assert str(agent("What is the weather in Oslo?")) and asked
    print(f"ok: {type(model).__name__}: agent, tool")

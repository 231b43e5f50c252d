"""AG2: an agent that answers, with a type, and with a function that it calls."""

# /// script
# dependencies = ["ag2[openai]==1.2.1"]
# ///

import asyncio
import os

from ag2 import Agent
from ag2.config import OpenAIConfig
from pydantic import BaseModel

config = OpenAIConfig(
    model="pocket",
    base_url=os.environ["RUNTIME_URL"] + "/v1",
    api_key="none",
    temperature=0,
    max_completion_tokens=200,
)
asked: list[str] = []


class Review(BaseModel):
    stars: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "21 degrees, clear"


async def main() -> None:
    agent = Agent("helper", "Be brief.", config=config)
    assert (await agent.ask("Count from 1 to 5.")).body == "1, 2, 3, 4, 5"
    typed = await agent.ask("A review of a phone.", response_schema=Review)
    assert isinstance(await typed.content(), Review)
    tools = Agent("helper", "Be brief.", config=config, tools=[get_weather])
    assert (await tools.ask("What is the weather in Oslo?")).body and asked
    print("ok: ask, response_schema, tools")


asyncio.run(main())

"""OpenAI's Agents SDK over responses and over chats: tools, hand-overs, typed outputs, streams."""

# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///

import asyncio
import os
from contextlib import suppress
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

client = AsyncOpenAI(base_url=os.environ["RUNTIME_URL"] + "/v1", api_key="none", max_retries=0)
set_tracing_disabled(True)
asked: list[str] = []


class Review(BaseModel):
    stars: int


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "21 degrees, clear"


async def main() -> None:
    for model in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        settings: Any = {
            "model": model(model="pocket", openai_client=client),
            "model_settings": ModelSettings(temperature=0, max_tokens=200),
        }
        plain = Agent(name="plain", instructions="Be brief.", **settings)
        assert (await Runner.run(plain, "Count from 1 to 5.")).final_output == "1, 2, 3, 4, 5"
        streamed = Runner.run_streamed(plain, "Count from 1 to 5.")
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds and streamed.final_output == "1, 2, 3, 4, 5"
        typed = Agent(name="typed", output_type=Review, **settings)
        assert isinstance((await Runner.run(typed, "A review of a phone.")).final_output, Review)
        asked.clear()
        tools = Agent(name="tools", tools=[get_weather], **settings)
        done = await Runner.run(tools, "What is the weather in Oslo?", max_turns=4)
        assert asked and done.final_output
        both = Agent(name="both", tools=[get_weather], output_type=Review, **settings)
        asked.clear()
        with suppress(MaxTurnsExceeded):  # the embedded model would call again and again
            await Runner.run(both, "What is the weather in Oslo?", max_turns=1)
        assert asked
        print(f"ok: {model.__name__}: run, run_streamed, output_type, tools, both together")


asyncio.run(main())

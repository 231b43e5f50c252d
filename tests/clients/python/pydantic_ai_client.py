"""pydantic-ai over chats, responses and Anthropic's messages: tools, typed outputs, streams."""

# /// script
# dependencies = ["pydantic-ai-slim[openai,anthropic]==2.68.0"]
# ///

import asyncio
import os
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL = os.environ["RUNTIME_URL"]
openai_provider = OpenAIProvider(base_url=URL + "/v1", api_key="none")
MODELS = (
    OpenAIChatModel("pocket", provider=openai_provider),
    OpenAIResponsesModel("pocket", provider=openai_provider),
    AnthropicModel("pocket", provider=AnthropicProvider(base_url=URL, api_key="none")),
)


class Review(BaseModel):
    stars: int


asked: list[str] = []


def get_weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "21 degrees, clear"


async def main() -> None:
    for model in MODELS:
        done: list[str] = []
        plain = Agent(model, model_settings={"temperature": 0, "max_tokens": 200})
        assert (await plain.run("Count from 1 to 5.")).output == "1, 2, 3, 4, 5"
        async with plain.run_stream("Count from 1 to 5.") as stream:
            assert [text async for text in stream.stream_text()][-1] == "1, 2, 3, 4, 5"
        done.append("run, run_stream")

        # its profile of Anthropic's models that it does not know has no native outputs
        kinds: Any = (ToolOutput,) if isinstance(model, AnthropicModel) else (ToolOutput, NativeOutput)
        for kind in kinds:
            typed = Agent(model, output_type=kind(Review), model_settings={"max_tokens": 200}, retries=0)
            assert isinstance((await typed.run("A review of a phone.")).output, Review)
            done.append(kind.__name__)

        asked.clear()
        agent = Agent(model, tools=[get_weather], model_settings={"temperature": 0, "max_tokens": 200})
        assert (await agent.run("What is the weather in Oslo?")).output and asked == ["Oslo"]
        print(f"ok: {type(model).__name__}: {', '.join(done)}, tools")


asyncio.run(main())

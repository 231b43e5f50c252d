"""AutoGen (autogen-ext) over OpenAI's API: create, streams, typed answers, an assistant with a tool."""

# /// script
# dependencies = ["autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"]
# ///

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

COUNT = [UserMessage(content="Count from 1 to 5.", source="user")]
asked: list[str] = []


class Review(BaseModel):
    stars: int


async def get_weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "21 degrees, clear"


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model="pocket",
        base_url=os.environ["RUNTIME_URL"] + "/v1",
        api_key="none",
        temperature=0,
        max_tokens=200,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": ModelFamily.UNKNOWN,
        },
    )
    assert (await client.create(COUNT)).content == "1, 2, 3, 4, 5"
    parts = [part async for part in client.create_stream(COUNT)]
    assert "".join(part for part in parts if isinstance(part, str)) == "1, 2, 3, 4, 5"
    Review.model_validate_json((await client.create(COUNT, json_output=Review)).content)
    print("ok: create, create_stream, json_output")
    agent = AssistantAgent("helper", client, tools=[get_weather], system_message="Be brief.")
    assert (await agent.run(task="What is the weather in Oslo?")).messages[-1] and asked
    print("ok: AssistantAgent with a tool")
    await client.close()


asyncio.run(main())

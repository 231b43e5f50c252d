"""Google's Agent Development Kit through litellm: an agent that calls a function."""

# /// script
# dependencies = ["google-adk==2.13.0", "litellm==1.106.2", "mcp==2.3.0"]
# ///

import asyncio
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for one on the net

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

asked: list[str] = []


def get_weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "21 degrees, clear"


async def main() -> None:
    agent = LlmAgent(
        name="helper",
        model=LiteLlm(model="openai/pocket", api_base=os.environ["RUNTIME_URL"] + "/v1", api_key="none"),
        tools=[get_weather],
        generate_content_config=types.GenerateContentConfig(temperature=0, max_output_tokens=200),
    )
    runner = InMemoryRunner(agent=agent, app_name="client")
    session = await runner.session_service.create_session(app_name="client", user_id="user")
    question = types.Content(role="user", parts=[types.Part(text="What is the weather in Oslo?")])
    events = [
        event async for event in runner.run_async(user_id="user", session_id=session.id, new_message=question)
    ]
    assert asked == ["Oslo"] and events[-1].content
    print("ok: LlmAgent with a function")


asyncio.run(main())

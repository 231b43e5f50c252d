"""Semantic Kernel: chats, streams, typed answers, functions called on their own."""

# /// script
# dependencies = ["semantic-kernel==1.45.0"]
# ///

import asyncio
import os

from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

asked: list[str] = []


class Review(BaseModel):
    stars: int


class Weather:
    @kernel_function(description="The weather in a city.")
    def get_weather(self, city: str) -> str:
        asked.append(city)
        return "21 degrees, clear"


def history(text: str) -> ChatHistory:
    messages = ChatHistory()
    messages.add_user_message(text)
    return messages


async def main() -> None:
    service = OpenAIChatCompletion(
        ai_model_id="pocket",
        async_client=AsyncOpenAI(base_url=os.environ["RUNTIME_URL"] + "/v1", api_key="none", max_retries=0),
    )
    settings = OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=200)
    count = history("Count from 1 to 5.")
    assert str(await service.get_chat_message_content(count, settings)) == "1, 2, 3, 4, 5"
    parts = [str(part) async for part in service.get_streaming_chat_message_content(count, settings)]
    assert "".join(parts) == "1, 2, 3, 4, 5"
    typed = OpenAIChatPromptExecutionSettings(response_format=Review, max_tokens=200)
    Review.model_validate_json(str(await service.get_chat_message_content(count, typed)))
    print("ok: chat, stream, response_format")
    kernel = Kernel()
    kernel.add_plugin(Weather(), "weather")
    settings.function_choice_behavior = (
        FunctionChoiceBehavior.Required()
    )  # pocket does not call functions of two-part names by itself
    question = history("What is the weather in Oslo?")
    assert await service.get_chat_message_content(question, settings, kernel=kernel) and asked
    print("ok: functions")


asyncio.run(main())

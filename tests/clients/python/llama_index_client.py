"""LlamaIndex over OpenAI's and Ollama's APIs: complete, chat, streams, structured predictions, an agent."""

# /// script
# dependencies = [
#   "llama-index-core==0.14.25",
#   "llama-index-llms-openai-like==0.8.1",
#   "llama-index-llms-ollama==0.11.0",
# ]
# ///

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL = os.environ["RUNTIME_URL"]
asked: list[str] = []


class Review(BaseModel):
    """A review of a product."""

    stars: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "21 degrees, clear"


MODELS = (
    OpenAILike(
        model="pocket",
        api_base=URL + "/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_tokens=200,
        temperature=0,
    ),
    Ollama(model="pocket", base_url=URL, temperature=0, context_window=2048, thinking=False),
)


async def main() -> None:
    for model in MODELS:
        count = [ChatMessage(role="user", content="Count from 1 to 5.")]
        assert model.chat(count).message.content == "1, 2, 3, 4, 5"
        assert [part.message.content for part in model.stream_chat(count)][-1] == "1, 2, 3, 4, 5"
        assert model.complete("Count from 1 to 5.").text
        review = model.structured_predict(Review, PromptTemplate("A review of a {product}."), product="phone")
        assert isinstance(review, Review)
        asked.clear()
        agent = FunctionAgent(llm=model, tools=[FunctionTool.from_defaults(get_weather)])
        assert str(await agent.run("What is the weather in Oslo?")) and asked == ["Oslo"]
        print(f"ok: {type(model).__name__}: chat, stream, complete, structured, agent")


asyncio.run(main())

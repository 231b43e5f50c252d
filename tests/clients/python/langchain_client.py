"""LangChain over OpenAI's, Anthropic's and Ollama's APIs, and an agent of each that calls a tool."""

# /// script
# dependencies = [
#   "langchain==1.4.7",
#   "langchain-openai==1.7.3",
#   "langchain-anthropic==1.7.7",
#   "langchain-ollama==1.1.0",
# ]
# ///

import os
from typing import Any

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
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


MODELS: list[Any] = [
    ChatOpenAI(model="pocket", base_url=URL + "/v1", api_key="none", temperature=0, max_tokens=200),
    ChatAnthropic(model="pocket", base_url=URL, api_key="none", temperature=0, max_tokens=200),
    ChatOllama(model="pocket", base_url=URL, temperature=0, num_predict=200),
]
for model in MODELS:
    assert model.invoke("Count from 1 to 5.").text == "1, 2, 3, 4, 5"
    assert "".join(chunk.text for chunk in model.stream("Count from 1 to 5.")) == "1, 2, 3, 4, 5"
    assert isinstance(model.with_structured_output(Review).invoke("A review of a phone."), Review)
    asked.clear()
    agent = create_agent(model, tools=[get_weather])
    question = {"messages": [{"role": "user", "content": "What is the weather in Oslo?"}]}
    assert agent.invoke(question)["messages"][-1].text and asked == ["Oslo"]
    assert list(agent.stream(question, stream_mode="messages"))
    print(f"ok: {type(model).__name__}: invoke, stream, structured output, agent with a tool")

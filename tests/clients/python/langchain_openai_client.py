"""LangChain over OpenAI's API: chats, responses, streams, tools, structured outputs, embeddings of texts."""

# /// script
# dependencies = ["langchain-openai==1.7.3"]
# ///

import os
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

SERVER: Any = {
    "model": "pocket",
    "base_url": os.environ["RUNTIME_URL"] + "/v1",
    "api_key": "none",
    "max_retries": 0,
    "temperature": 0,
}


class Review(BaseModel):
    """A review of a product."""

    stars: int


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"21 degrees in {city}"


for name, chat in {
    "chat": ChatOpenAI(**SERVER, max_tokens=200),
    "responses": ChatOpenAI(**SERVER, max_tokens=200, use_responses_api=True),
}.items():
    assert chat.invoke("Count from 1 to 5.").text == "1, 2, 3, 4, 5"
    assert "".join(chunk.text for chunk in chat.stream("Count from 1 to 5.")) == "1, 2, 3, 4, 5"
    for method in ("json_schema", "function_calling"):
        review = chat.with_structured_output(Review, method=method).invoke("A review of a phone.")
        assert isinstance(review, Review)
    messages: list[Any] = [HumanMessage("What is the weather in Oslo?")]
    messages.append(chat.bind_tools([get_weather]).invoke(messages))
    (call,) = messages[-1].tool_calls
    messages.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
    assert chat.bind_tools([get_weather]).invoke(messages).text
    print(f"ok: {name}: invoke, stream, structured output, tools")

assert OpenAI(**SERVER, max_tokens=5).invoke("Once upon a time")
assert len(ChatOpenAI(**SERVER, max_tokens=5).batch(["Hello!", "Good morning!"])) == 2
print("ok: completions, batch")

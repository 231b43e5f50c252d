"""Mirascope: a call, a stream, a typed answer, a tool."""

# /// script
# dependencies = ["mirascope[openai]==2.8.2"]
# ///

import os

os.environ |= {"OPENAI_BASE_URL": os.environ["RUNTIME_URL"] + "/v1", "OPENAI_API_KEY": "none"}

from mirascope import llm
from pydantic import BaseModel


class Review(BaseModel):
    stars: int


asked: list[str] = []


@llm.tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "21 degrees, clear"


for model in ("openai/pocket:completions", "openai/pocket:responses"):

    @llm.call(model, temperature=0, max_tokens=200)
    def count() -> str:
        return "Count from 1 to 5."

    assert count().text() == "1, 2, 3, 4, 5"
    assert "".join(count.stream().text_stream()).strip() == "1, 2, 3, 4, 5"

    @llm.call(model, format=Review, max_tokens=200)
    def review() -> str:
        return "A review of a phone."

    assert isinstance(review().parse(), Review)

    @llm.call(model, tools=[get_weather], temperature=0, max_tokens=200)
    def weather() -> str:
        return "What is the weather in Oslo?"

    asked.clear()
    response = weather()
    assert response.resume(response.execute_tools()).text() and asked
    print(f"ok: {model}: call, stream, format, tools")

"""magentic: prompts as functions, with texts, types, streams and function calls."""

# /// script
# dependencies = ["magentic==0.41.1"]
# ///

import os

from magentic import FunctionCall, StreamedStr, prompt
from magentic.chat_model.openai_chat_model import OpenaiChatModel
from pydantic import BaseModel

model = OpenaiChatModel(
    "pocket", base_url=os.environ["RUNTIME_URL"] + "/v1", api_key="none", temperature=0, max_tokens=200
)


class Review(BaseModel):
    stars: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"21 degrees in {city}"


@prompt("Count from 1 to {number}.", model=model)
def count(number: int) -> str: ...


@prompt("Count from 1 to {number}.", model=model)
def count_aloud(number: int) -> StreamedStr: ...


@prompt("A review of a phone.", model=model)
def review() -> Review: ...


@prompt("What is the weather in {city}?", functions=[get_weather], model=model)
def weather(city: str) -> FunctionCall[str]: ...


assert count(5) == "1, 2, 3, 4, 5" and "".join(count_aloud(5)) == "1, 2, 3, 4, 5"
assert isinstance(review(), Review) and "Oslo" in weather("Oslo")()
print("ok: str, StreamedStr, BaseModel, FunctionCall")

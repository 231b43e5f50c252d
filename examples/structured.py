"""An answer that is an instance of a class: the grammar of its JSON Schema holds the model to it."""

import os
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, Field

url = os.environ.get("RUNTIME_URL", "http://127.0.0.1:30000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("RUNTIME_API_KEY", "none"))
model = client.models.list().data[0].id


class Review(BaseModel):
    """What is wanted of the answer."""

    verdict: Literal["good", "bad", "mixed"]
    stars: int = Field(ge=1, le=5)
    words: list[Annotated[str, Field(max_length=12)]] = Field(max_length=3)


answer = client.chat.completions.parse(
    model=model,
    response_format=Review,
    max_completion_tokens=400,
    messages=[{"role": "user", "content": "Review: the tea was hot and the cake was fine."}],
)
print(answer.choices[0].message.parsed)

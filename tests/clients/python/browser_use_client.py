"""browser-use's models of OpenAI and Ollama: a message, and an answer in the form of its agent's outputs."""

# /// script
# dependencies = ["browser-use==0.13.14"]
# ///

import asyncio
import os

os.environ |= {"ANONYMIZED_TELEMETRY": "false", "BROWSER_USE_CLOUD_SYNC": "false"}

from browser_use import ChatOllama, ChatOpenAI
from browser_use.llm.messages import UserMessage
from pydantic import BaseModel

URL = os.environ["RUNTIME_URL"]


class Step(BaseModel):
    click: int
    done: bool


async def main() -> None:
    for model in (
        ChatOpenAI(model="pocket", base_url=URL + "/v1", api_key="none", max_completion_tokens=300),
        ChatOllama(model="pocket", host=URL),
    ):
        assert (await model.ainvoke([UserMessage(content="Hello!")])).completion
        step = await model.ainvoke([UserMessage(content="What next?")], output_format=Step)
        assert isinstance(step.completion, Step)
        print(f"ok: {type(model).__name__}: ainvoke, output_format")


asyncio.run(main())

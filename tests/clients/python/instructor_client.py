"""instructor: typed answers through chats, tools, responses and Anthropic's messages."""

# /// script
# dependencies = ["instructor==1.17.0", "anthropic==2.12.0"]
# ///

import os
from typing import Any, Literal

import anthropic
import instructor
import openai
from pydantic import BaseModel

URL = os.environ["RUNTIME_URL"]


class Review(BaseModel):
    verdict: Literal["good", "bad"]
    stars: int


ASK: Any = {
    "model": "pocket",
    "messages": [{"role": "user", "content": "A review of a phone."}],
    "response_model": Review,
    "max_retries": 0,
}
plain = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
MODES = instructor.Mode
for mode in (MODES.TOOLS, MODES.TOOLS_STRICT, MODES.JSON_SCHEMA, MODES.RESPONSES_TOOLS):
    client = instructor.from_openai(plain, mode=mode)
    assert isinstance(client.chat.completions.create(**ASK, temperature=0), Review)
    print(f"ok: {mode.name}")

claude = instructor.from_anthropic(
    anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0), mode=MODES.ANTHROPIC_TOOLS
)
assert isinstance(claude.messages.create(**ASK, max_tokens=200), Review)
print("ok: ANTHROPIC_TOOLS")

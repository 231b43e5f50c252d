"""Outlines over OpenAI's API: a text, a stream, a typed answer."""

# /// script
# dependencies = ["outlines==1.3.3", "openai==3.54.0"]
# ///

import os

import openai
import outlines
from pydantic import BaseModel


class Review(BaseModel):
    stars: int


client = openai.OpenAI(base_url=os.environ["RUNTIME_URL"] + "/v1", api_key="none", max_retries=0)
model = outlines.from_openai(client, "pocket")
assert model("Count from 1 to 5.", temperature=0) == "1, 2, 3, 4, 5"
assert "".join(model.stream("Count from 1 to 5.", temperature=0)) == "1, 2, 3, 4, 5"
Review.model_validate_json(model("A review of a phone.", Review))
print("ok: from_openai: text, stream, type")

served = outlines.from_vllm(client, "pocket")
assert served("Is this a question?", outlines.types.Choice(["yes", "no"])) in ("yes", "no")
assert served("A number.", outlines.types.Regex(r"[0-9]{3}")).isdigit()
print("ok: from_vllm: choice, regex")

sglang = outlines.from_sglang(client, "pocket")
assert sglang("A number.", outlines.types.Regex(r"[0-9]{3}")).isdigit()
print("ok: from_sglang: regex")

"""guidance over OpenAI's API: a generated text, and one of a schema."""

# /// script
# dependencies = ["guidance==0.3.1", "openai==3.54.0"]
# ///

import json
import os

import guidance
from guidance import assistant, gen, user
from guidance.models import OpenAI

model = OpenAI("pocket", api_key="none", base_url=os.environ["RUNTIME_URL"] + "/v1", echo=False)
with user():
    lm = model + "Count from 1 to 5."
with assistant():
    lm += gen("count", max_tokens=30, temperature=0)
assert lm["count"].strip() == "1, 2, 3, 4, 5", lm["count"]
print("ok: gen")
with user():
    lm = model + "A review of a phone."
with assistant():
    lm += guidance.json(
        "review",
        schema={
            "type": "object",
            "properties": {"stars": {"type": "integer"}},
            "required": ["stars"],
            "additionalProperties": False,
        },
    )
assert json.loads(lm["review"]).keys() == {"stars"}
print("ok: json")

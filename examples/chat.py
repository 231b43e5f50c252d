"""A streamed chat with openai's client."""

import os

from openai import OpenAI

url = os.environ.get("RUNTIME_URL", "http://127.0.0.1:30000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("RUNTIME_API_KEY", "none"))
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    stream=True,
    max_completion_tokens=60,
    messages=[{"role": "user", "content": "Count from 1 to 5."}],
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

"""A streamed chat with anthropic's client."""

import os

from anthropic import Anthropic

client = Anthropic(
    base_url=os.environ.get("RUNTIME_URL", "http://127.0.0.1:30000"),
    api_key=os.environ.get("RUNTIME_API_KEY", "none"),
)
model = client.models.list().data[0].id

with client.messages.stream(
    model=model, max_tokens=60, messages=[{"role": "user", "content": "Count from 1 to 5."}]
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()

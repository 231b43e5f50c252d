"""A file of requests, answered in idle time. The server needs `--file-storage-path FOLDER`."""

import io
import json
import os
import time

from openai import OpenAI

url = os.environ.get("RUNTIME_URL", "http://127.0.0.1:30000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("RUNTIME_API_KEY", "none"))
model = client.models.list().data[0].id

lines = [
    {
        "custom_id": f"sum-{i}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "messages": [{"role": "user", "content": f"What is {i} + {i}?"}],
            "max_completion_tokens": 20,
        },
    }
    for i in range(1, 6)
]
text = "\n".join(map(json.dumps, lines))
file = client.files.create(file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(batch.status, batch.request_counts)
if batch.output_file_id:
    for line in client.files.content(batch.output_file_id).text.splitlines():
        answered = json.loads(line)
        print(answered["custom_id"], answered["response"]["body"]["choices"][0]["message"]["content"])

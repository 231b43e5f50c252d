"""No library: HTTP of the standard library, server-sent events by hand, keep-alive, curl if it is there."""

# /// script
# dependencies = []
# ///

import http.client
import json
import os
import shutil
import subprocess
from urllib.parse import urlsplit

URL = os.environ["RUNTIME_URL"]
COUNT = {"model": "pocket", "messages": [{"role": "user", "content": "Count from 1 to 5."}], "temperature": 0}

connection = http.client.HTTPConnection(urlsplit(URL).netloc, timeout=60)
for _ in range(2):  # on one connection
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(COUNT), {"content-type": "application/json"}
    )
    answer = json.load(connection.getresponse())
    assert answer["choices"][0]["message"]["content"] == "1, 2, 3, 4, 5"
print("ok: http.client, two requests on a connection")

connection.request(
    "POST", "/v1/chat/completions", json.dumps(COUNT | {"stream": True}), {"content-type": "application/json"}
)
events = [line for line in connection.getresponse().read().decode().split("\n\n") if line]
assert events[-1] == "data: [DONE]"
deltas = [json.loads(event.removeprefix("data: "))["choices"] for event in events[:-1]]
assert "".join(choice[0]["delta"].get("content") or "" for choice in deltas if choice) == "1, 2, 3, 4, 5"
print("ok: server-sent events")

if shutil.which("curl"):
    done = subprocess.run(
        ["curl", "-sS", "--fail", f"{URL}/v1/chat/completions", "--json", json.dumps(COUNT)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "1, 2, 3, 4, 5"
    print("ok: curl --json")

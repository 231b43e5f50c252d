"""A batch outlives kill -9 of the server."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.e2e.serving import WAIT_S, Server, serve

LINES = 400


def status(server: Server, batch_id: str) -> str:
    return server.client.batches.retrieve(batch_id).status


def test_a_killed_server_answers_the_rest(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    options = (
        "--model-path",
        str(checkpoint("llama")),
        "--dtype",
        "float32",
        "--file-storage-path",
        str(tmp_path),
    )
    body = {"model": "default", "prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    data = "".join(
        json.dumps(
            {
                "custom_id": str(i),
                "method": "POST",
                "url": "/v1/completions",
                "body": body | {"prompt": f"abc {i % 7}"},
            }
        )
        + "\n"
        for i in range(LINES)
    )
    with serve(*options) as server:
        file = server.client.files.create(file=("in.jsonl", data.encode()), purpose="batch")
        batch = server.client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        server.wait(lambda: server.client.batches.retrieve(batch.id).request_counts.completed > 20)
        before = server.client.batches.retrieve(batch.id).request_counts.completed
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(WAIT_S)
    with serve(*options) as server:
        direct = [
            server.client.completions.create(
                model="default",
                prompt=f"abc {i}",
                max_tokens=8,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            .choices[0]
            .text
            for i in range(7)
        ]
        server.wait(lambda: status(server, batch.id) == "completed")
        batch = server.client.batches.retrieve(batch.id)
        answers = [
            json.loads(line) for line in server.client.files.content(batch.output_file_id).text.splitlines()
        ]
    assert before < LINES, "the server was killed too late to show anything"
    assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(LINES))
    assert batch.error_file_id is None and batch.request_counts.completed == LINES
    for answer in answers:
        assert answer["response"]["body"]["choices"][0]["text"] == direct[int(answer["custom_id"]) % 7]

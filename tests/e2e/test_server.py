"""`runtime serve` as a stranger meets it: a process, a port, the openai client, clients that leave."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
import pytest

from tests.e2e.conftest import Generate
from tests.e2e.serving import WAIT_S, Server, serve
from tests.metrics.read import sample


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], Path]) -> Iterator[Server]:
    with serve(
        "--model-path", str(checkpoint("qwen3")), "--dtype", "float32", "--served-model-name", "tiny"
    ) as running:
        yield running


def test_health_says_how_far_a_start_is() -> None:
    """Phases come in the order of a start, and a fraction of each; a server that is ready has none."""
    command = ["serve", "--port", "0", "--num-threads", "1", "--log-format", "json", "--standby-ranks", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime", *command, "--warmups", "generate"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        url = next(json.loads(line)["url"] for line in process.stderr if "listening" in line)
        seen = []
        while (answer := httpx.get(f"{url}/health", timeout=WAIT_S)).status_code == 503:
            seen.append(answer.json())
        assert answer.json() == {"state": "ready", "detail": ""}
        assert all(each["state"] == "loading" for each in seen)
        reported = [each for each in seen if "phase" in each]
        assert all(0 <= each["fraction"] <= 1 and each["detail"] for each in reported)
        order = ["process", "device", "weights", "packing", "compile", "profile", "pages", "warm-up"]
        found = [order.index(each["phase"]) for each in reported]
        assert found == sorted(found) and found[0] == 0, "a rank takes seconds to import torch"
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)


def test_chat_streams_what_it_says_at_once(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "Hello!"}]
    whole = server.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=20, temperature=0
    )
    chunks = list(
        server.client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_completion_equals_transformers(server: Server, reference: Generate) -> None:
    prompt = list(range(20, 60))
    answer = httpx.post(
        server.url + "/generate",
        timeout=WAIT_S,
        json={
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        },
    ).json()
    assert answer["output_ids"] == reference("qwen3", prompt, 8)


def test_the_loop_process_has_no_torch(server: Server) -> None:
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in server.rank_pids())


def test_stop_strings_and_seeds(server: Server) -> None:
    def text(**more: Any) -> str:
        return (
            server.client.completions.create(
                model="tiny", prompt="abc", max_tokens=30, seed=5, temperature=1.5, **more
            )
            .choices[0]
            .text
        )

    whole = text(extra_body={"ignore_eos": True})
    assert text(extra_body={"ignore_eos": True}) == whole
    stop = whole[10]
    assert text(stop=stop, extra_body={"ignore_eos": True}) == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 5_000_000),
        ("seed", 2**64),
        ("top_logprobs", 100_000),
        ("logit_bias", {"5": 1e300}),
        ("max_tokens", -1),
        ("temperature", -0.5),
        ("stop", [""]),
        ("messages", []),
        ("frequency_penalty", 1e9),
    ],
)
def test_a_bad_number_names_its_field_and_harms_no_request(server: Server, field: str, value: Any) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4,
        "logprobs": True,
        field: value,
    }
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)
    assert server.get("/health_generate").status_code == 200


@pytest.mark.parametrize("ids", [[-1], [10**6], [], [2**70]])
def test_ids_outside_the_vocabulary(server: Server, ids: list[int]) -> None:
    answer = httpx.post(server.url + "/generate", json={"input_ids": ids}, timeout=WAIT_S)
    assert answer.status_code == 400 and answer.json()["error"]["param"]


def test_clients_that_leave_leave_nothing(server: Server) -> None:
    anyio.run(storm, server.url, backend_options={"use_uvloop": True})
    server.wait(lambda: server.load()["num_total_reqs"] == 0)
    assert server.load()["num_used_tokens"] == 0
    assert server.get("/health_generate").status_code == 200


async def storm(url: str) -> None:
    """64 clients, each of which leaves at a random moment: while sending, while waiting, while reading, or
    not at all."""
    random = Random(0)
    host, port = re.findall(r"//(.*):(\d+)", url)[0]

    async def client(i: int) -> None:
        is_stream = i % 2 == 0
        body = json.dumps(
            {
                "model": "tiny",
                "prompt": [i, *range(30)],
                "max_tokens": 60,
                "stream": is_stream,
                "ignore_eos": True,
            }
        ).encode()
        request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        cut = len(request) if i % 5 else random.randrange(len(request))
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request[:cut])
            await writer.drain()
            if cut == len(request) and i % 3:
                await reader.read(random.randrange(1, 4000))
        finally:
            writer.close()

    async with anyio.create_task_group() as tasks:
        for i in range(64):
            tasks.start_soon(client, i)


def test_a_signal_drains(checkpoint: Callable[[str], Path]) -> None:
    with serve("--model-path", str(checkpoint("llama"))) as server:
        stream = server.client.completions.create(
            model=server.client.models.list().data[0].id,
            prompt="abc",
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        ranks = server.rank_pids()
        server.process.send_signal(signal.SIGTERM)
        assert [c.choices[0].finish_reason for c in stream][-1] == "length", "the open request may finish"
        assert server.process.wait(WAIT_S) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_dead_rank_is_a_pause(checkpoint: Callable[[str], Path]) -> None:
    with serve("--model-path", str(checkpoint("llama")), "--dtype", "float32") as server:

        def ask(**more: Any) -> Any:
            return server.client.completions.create(
                model="default",
                prompt="abc",
                max_tokens=200,
                temperature=0,
                extra_body={"ignore_eos": True},
                **more,
            )

        expected = ask().choices[0].text
        stream = ask(stream=True)
        text = next(iter(stream)).choices[0].text
        (dead,) = server.rank_pids()
        os.kill(dead, signal.SIGKILL)
        server.wait(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json()["state"] == "recovering"
        late = ask()  # waits, and is answered
        assert (
            text + "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
            == late.choices[0].text
            == expected
        )
        assert server.get("/health").status_code == 200 and dead not in server.rank_pids()
        assert sample(server.get("/metrics").content, "runtime_rank_restarts_total") == 1


def test_ranks_that_crash_again_and_again_end_the_server(checkpoint: Callable[[str], Path]) -> None:
    with serve("--model-path", str(checkpoint("llama"))) as server:
        for _ in range(2):
            os.kill(server.rank_pids()[0], signal.SIGSEGV)  # which ranks do to themselves
            server.wait(lambda: server.get("/health").status_code == 503)
            server.wait(lambda: server.get("/health").status_code == 200)
        os.kill(server.rank_pids()[0], signal.SIGSEGV)
        assert server.process.wait(WAIT_S) == 1


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda path: path / "nowhere", "does not exist; give a folder"),
        (lambda path: path, "has no config.json"),
    ],
)
def test_a_wrong_folder_is_one_line(make: Callable[[Path], Path], words: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtime", "serve", "--model-path", str(make(tmp_path))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_missing_weights_are_one_line(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    for file in checkpoint("llama").iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "runtime",
            "serve",
            "--port",
            "0",
            "--log-level",
            "error",
            "--model-path",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 2 and "safetensors" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    )

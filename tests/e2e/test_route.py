"""`runtime route` before two servers: answers are those of one, whichever gives them, and one may die."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import WAIT_S, Server, serve

NUM_CLIENTS = 16
LENGTH = 400  # tokens of an answer that a server is to be killed in


@contextmanager
def route(*options: str) -> Iterator[httpx.Client]:
    """A client of a router with these options."""
    command = [sys.executable, "-m", "runtime", "route", "--port", "0", "--log-format", "json", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(json.loads(line)["url"] for line in process.stderr if "listening" in line)
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            yield client
    finally:
        process.terminate()
        assert process.wait(WAIT_S) == 0
        process.stderr.close()  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def servers(checkpoint: Callable[[str], Path]) -> Iterator[tuple[Server, Server]]:
    options = "--model-path", str(checkpoint("qwen3")), "--dtype", "float32", "--served-model-name", "tiny"
    with serve(*options) as first, serve(*options) as second:
        yield first, second


def ask(client: httpx.Client, prompt: str, count: int = 8, **more: Any) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_healthy(client: httpx.Client, count: int) -> None:
    while client.get("/health").json()["healthy_workers"] != count:
        pass


def test_equal_beginnings_meet_where_they_are_cached(servers: tuple[Server, Server]) -> None:
    with route("--worker-urls", *(one.url for one in servers)) as client:
        wait_healthy(client, 2)
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny"]
        for prompt in ("the first prompt, " * 20, "quite another one. " * 20):
            cached = [
                ask(client, f"{prompt}{i}")["usage"]["prompt_tokens_details"]["cached_tokens"]
                for i in range(4)
            ]
            assert cached[0] == 0 and min(cached[1:]) > 100, cached


def test_a_server_that_is_killed_costs_no_answer(servers: tuple[Server, Server]) -> None:
    """The last test of this file: one of the servers is gone afterwards."""
    first, second = servers
    with httpx.Client(base_url=first.url, timeout=WAIT_S) as alone:
        expected = {i: ask(alone, f"prompt {i}", LENGTH)["choices"] for i in range(NUM_CLIENTS)}
    with route("--policy", "round_robin", "--worker-urls", first.url, second.url) as client:
        wait_healthy(client, 2)
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            answers = [clients.submit(ask, client, f"prompt {i}", LENGTH) for i in range(NUM_CLIENTS)]
            while second.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0:
                assert not all(one.done() for one in answers)
            os.kill(second.process.pid, signal.SIGKILL)
            found = {i: one.result()["choices"] for i, one in enumerate(answers)}
        assert found == expected
        lines = client.get("/metrics").text.splitlines()
        assert f'runtime_route_worker_health{{worker="{second.url}"}} 0' in lines
        retries = next(line for line in lines if line.startswith("runtime_route_retries_total"))
        assert int(retries.split()[1]) > 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_prompts_and_answers_on_different_servers(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The server for prompts is killed under load, and at last the one for answers."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    key.chmod(0o600)
    port = free_port()
    own = "--disaggregation-key-file", str(key)
    options = "--model-path", str(checkpoint("qwen3")), "--dtype", "float32", "--served-model-name", "tiny"
    prefill = *options, *own, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port)
    decode = *options, *own, "--disaggregation-mode", "decode"
    with serve(*prefill) as first, serve(*prefill[:-1], str(free_port())) as spare, serve(*decode) as second:
        with httpx.Client(base_url=spare.url, timeout=WAIT_S) as alone:
            expected = {i: ask(alone, f"prompt {i} " * 30, 32)["choices"] for i in range(NUM_CLIENTS)}
        servers = "--prefill", first.url, str(port), "--decode", second.url
        with route("--pd-disaggregation", *own, *servers) as client:
            wait_healthy(client, 2)
            usage = ask(client, "prompt 0 " * 30, 32)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > 100
            assert "runtime_transfer_failures_total 0\n" in second.get("/metrics").text
            with ThreadPoolExecutor(NUM_CLIENTS) as clients:
                answers = [clients.submit(ask, client, f"prompt {i} " * 30, 32) for i in range(NUM_CLIENTS)]
                while second.load()["num_running_reqs"] == 0:
                    assert not all(one.done() for one in answers)
                os.kill(first.process.pid, signal.SIGKILL)
                assert {i: one.result()["choices"] for i, one in enumerate(answers)} == expected
            assert ask(client, "prompt 3 " * 30, 32)["choices"] == expected[3], "the other one does it all"
            client.post("/workers", json={"url": spare.url, "worker_type": "prefill", "bootstrap_port": 1})
            while spare.url not in [
                one["url"] for one in client.get("/workers").json()["workers"] if one["is_healthy"]
            ]:
                pass
            os.kill(second.process.pid, signal.SIGKILL)
            assert ask(client, "prompt 5 " * 30, 32)["choices"] == expected[5]

"""Ranks die under load, over HTTP: 64 clients of three APIs, half of them streaming, get the answers of
an undisturbed server."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import anyio
import httpx
import pytest

from tests.e2e.serving import WAIT_S, Server, serve
from tests.metrics.read import sample

pytestmark = pytest.mark.anyio

# token of the letter a in the embedded vocabulary: every token of an answer can be seen in its text
FIRST = 71
NULL = (
    "--device",
    "null",
    "--served-model-name",
    "null",
    "--max-total-tokens",
    "65536",
    "--null-step-s",
    "0.01",
    "--null-first-token",
    str(FIRST),
)
NEW_TOKENS = 120
CLIENTS = 64
STREAMED = CLIENTS // 2 * NEW_TOKENS  # characters
POISON = 44  # a token in one prompt, and in no answer
DIALECTS = ("/v1/chat/completions", "/v1/completions", "/generate")


class Client:
    """One request, and what came back for it."""

    def __init__(self, i: int, prompt: list[int] | None = None) -> None:
        self.path = DIALECTS[1 if prompt else i % 3]
        self.is_stream = not prompt and i // 3 % 2 == 0
        self.prompt = prompt or [i, *range(100, 110 + i)]
        self.seed = i % 26
        self.text = ""
        self.num_finishes = 0
        self.status = 0
        self.error: dict[str, Any] = {}

    def body(self) -> dict[str, Any]:
        if self.path == "/generate":
            return {
                "input_ids": self.prompt,
                "stream": self.is_stream,
                "sampling_params": {
                    "max_new_tokens": NEW_TOKENS,
                    "ignore_eos": True,
                    "sampling_seed": self.seed,
                },
            }
        if self.path == "/v1/completions":
            what: dict[str, Any] = {"prompt": self.prompt}
        else:
            what = {"messages": [{"role": "user", "content": "say the alphabet" + "!" * self.seed}]}
        return {
            "model": "null",
            "max_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "seed": self.seed,
            "stream": self.is_stream,
        } | what

    async def ask(self, http: httpx.AsyncClient, came: Callable[[int], None] = lambda _: None) -> None:
        """`came` is given how many characters a stream has brought."""
        async with http.stream("POST", self.path, json=self.body()) as response:
            self.status = response.status_code
            if not self.is_stream or self.status != 200:
                self.take(json.loads(await response.aread()))
                return
            lines = [line async for line in self.lines(response, came)]
        assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1

    async def lines(self, response: httpx.Response, came: Callable[[int], None]) -> Any:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                before = len(self.text)
                if line != "data: [DONE]":
                    self.take(json.loads(line[6:]))
                came(len(self.text) - before)
                yield line[6:]

    def take(self, answer: dict[str, Any]) -> None:
        """A whole answer or a chunk of one."""
        if "error" in answer:
            self.error = answer["error"]
        elif self.path == "/generate":
            assert answer["text"].startswith(self.text), "text that was sent is taken back"
            self.text = answer["text"]
            self.num_finishes += answer["meta_info"]["finish_reason"] is not None
        else:
            (choice,) = answer["choices"]
            message = choice.get("message") or choice.get("delta") or choice
            self.text += message.get("content") or message.get("text") or ""
            self.num_finishes += choice["finish_reason"] is not None


def alphabet(begin: int) -> str:
    """What the null device says from this number on."""
    return "".join(chr(ord("a") + (begin + i) % 26) for i in range(NEW_TOKENS))


class Trouble:
    """Hurts a rank each time the streams have brought so many characters, and sees what /health says until
    all is well again."""

    def __init__(
        self, server: Server, http: httpx.AsyncClient, number: signal.Signals, points: list[int]
    ) -> None:
        self.server, self.http, self.number, self.points = server, http, number, points
        self.random = Random(sum(points))
        self.num_chars = 0
        self.reached = anyio.Event()
        self.hurt: list[int] = []  # process ids

    def came(self, count: int) -> None:
        self.num_chars += count
        if self.points and self.num_chars >= self.points[0]:
            self.reached.set()

    async def run(self) -> None:
        while self.points:
            await self.reached.wait()
            self.points.pop(0)
            self.reached = anyio.Event()
            # only one of the null device's ranks is waited for when it hangs: the first, which reports
            ranks = self.server.rank_pids()
            self.hurt.append(self.random.choice(ranks) if self.number == signal.SIGKILL else ranks[0])
            os.kill(self.hurt[-1], self.number)
            await self.health("recovering", 503)
            await self.health("ready", 200)

    async def health(self, state: str, status: int) -> None:
        """Waits for this state; what it says on the way is one of the two."""
        while True:
            answer = await self.http.get("/health")
            assert (answer.json()["state"], answer.status_code) in {("ready", 200), ("recovering", 503)}
            if answer.json()["state"] == state:
                assert answer.status_code == status
                return


async def load(
    server: Server, number: signal.Signals = signal.SIGKILL, points: tuple[int, ...] = ()
) -> tuple[list[str], Trouble]:
    """64 clients at once. Returns their texts, each complete and once."""
    clients = [Client(i) for i in range(CLIENTS)]
    limits = httpx.Limits(max_connections=CLIENTS + 1)
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, limits=limits) as http:
        trouble = Trouble(server, http, number, list(points))
        with anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(trouble.run)
                for client in clients:
                    tasks.start_soon(client.ask, http, trouble.came)
    assert {(client.status, client.num_finishes, len(client.text)) for client in clients} == {
        (200, 1, NEW_TOKENS)
    }
    return [client.text for client in clients], trouble


def descriptors(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def nothing_is_left(server: Server, num_fds: int) -> None:
    server.wait(lambda: server.load()["num_total_reqs"] == 0)
    assert server.load()["num_used_tokens"] == 0
    server.wait(lambda: descriptors(server) <= num_fds)
    metrics = server.get("/metrics").content
    assert (
        sample(metrics, "runtime_failed_requests_total") == sample(metrics, "runtime_cache_leaks_total") == 0
    )


@pytest.mark.parametrize(
    "tp_size, number, options",
    [(1, signal.SIGKILL, ()), (2, signal.SIGKILL, ()), (2, signal.SIGSTOP, ("--watchdog-timeout", "1"))],
    ids=["1-dies", "2-die", "2-hang"],
)
async def test_ranks_die_under_load_and_no_client_sees_anything_else(
    tp_size: int, number: signal.Signals, options: tuple[str, ...]
) -> None:
    with serve(*NULL, "--tp-size", str(tp_size), *options) as server:
        expected, _ = await load(server)
        assert [expected[i] for i in (1, 2, 3 * 7 + 1)] == [
            alphabet(11 + 1 + 1),
            alphabet(11 + 2 + 2),
            alphabet(11 + 22 + 22),
        ]
        server.wait(lambda: server.load()["num_total_reqs"] == 0)
        num_fds, random = descriptors(server), Random(tp_size)
        points = (
            random.randrange(STREAMED // 20, STREAMED // 3),
            random.randrange(STREAMED // 2, STREAMED * 3 // 4),
        )
        texts, trouble = await load(server, number, points)
        assert texts == expected
        assert (
            len(trouble.hurt) == 2 and all(map(is_gone, trouble.hurt)) and len(server.rank_pids()) == tp_size
        )
        metrics = server.get("/metrics").content
        assert (
            sample(metrics, "runtime_rank_restarts_total") >= 2
            and sample(metrics, "runtime_recovered_requests_total") >= 2
        )
        nothing_is_left(server, num_fds)
        ranks = server.rank_pids()
    assert all(map(is_gone, ranks))


async def test_a_request_that_kills_ranks_fails_alone_among_twenty_streams() -> None:
    with serve(
        *NULL, "--null-poison-token", str(POISON), "--null-poison", "kill", "--tp-size", "2"
    ) as server:
        innocents, guilty = [Client(6 * k + k % 3) for k in range(20)], Client(0, [1, 2, POISON])
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as http:
            begun, num_chars = anyio.Event(), [0]

            def came(count: int) -> None:
                num_chars[0] += count
                if num_chars[0] > 20 * NEW_TOKENS // 4:
                    begun.set()

            async def harm() -> None:
                await begun.wait()
                await guilty.ask(http)

            with anyio.fail_after(WAIT_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(harm)
                    for client in innocents:
                        tasks.start_soon(client.ask, http, came)
            assert guilty.status == 500 and "this request" in guilty.error["message"] and guilty.text == ""
            assert {(client.is_stream, client.status, client.num_finishes) for client in innocents} == {
                (True, 200, 1)
            }
            disturbed = [client.text for client in innocents]
            again = [Client(6 * k + k % 3) for k in range(20)]
            async with anyio.create_task_group() as tasks:
                for client in again:
                    tasks.start_soon(client.ask, http)
        assert disturbed == [client.text for client in again]
        assert sample(server.get("/metrics").content, "runtime_failed_requests_total") == 1
        server.wait(lambda: server.load()["num_total_reqs"] == 0)
        assert server.load()["num_used_tokens"] == 0

"""Good requests next to hostile ones: the same few, again and again, each of which must get the answer that
it gets on a quiet server."""

import asyncio
import json
import time
from typing import Any

from tests.hostile.case import MESSAGES, NATIVE, Case, chat, dump, named, text
from tests.hostile.wire import exchange

GOOD_KEY = "neighbour-user"
_TEXTS = ("text", "content", "response", "thinking", "partial_json", "reasoning_content")
_ENDS = ("finish_reason", "stop_reason", "done_reason", "matched_stop", "completion_tokens", "output_tokens")
SAMPLED = {"temperature": 0.8, "ignore_eos": True}


def _good(name: str, path: str, body: bytes, *, needs_model: bool = False) -> Case:
    return Case(name, path, body, (200,), key=GOOD_KEY, needs_model=needs_model)


GOOD = (
    _good("chat", "/v1/chat/completions", chat(max_tokens=20, seed=3, **SAMPLED)),
    _good("chat-stream", "/v1/chat/completions", chat(max_tokens=24, seed=4, stream=True, **SAMPLED)),
    _good(
        "chat-logprobs",
        "/v1/chat/completions",
        chat(max_tokens=9, seed=5, logprobs=True, top_logprobs=3, **SAMPLED),
    ),
    _good("text", "/v1/completions", text(max_tokens=30, prompt="Once upon", seed=6, **SAMPLED)),
    _good(
        "text-stream",
        "/v1/completions",
        text(max_tokens=40, prompt=[9, 8, 7, 40], seed=7, stream=True, **SAMPLED),
    ),
    _good("text-n", "/v1/completions", text(max_tokens=8, n=3, seed=8, **SAMPLED)),
    _good(
        "native",
        NATIVE,
        dump({"text": "The", "sampling_params": {"max_new_tokens": 25, "sampling_seed": 10, **SAMPLED}}),
    ),
    _good(
        "messages",
        MESSAGES,
        named({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 18, "temperature": 0}),
        needs_model=True,
    ),
    _good(
        "ollama",
        "/api/chat",
        named(
            {
                "messages": [{"role": "user", "content": "Hello"}],
                "options": {"num_predict": 15, "seed": 9, "temperature": 0},
            }
        ),
    ),
)


def essence(body: bytes) -> tuple[str, ...]:
    """What an answer says, without what differs from time to time: its texts, joined over the events of a
    stream for each choice, then how it ended."""
    texts: dict[int, str] = {}
    ends: list[str] = []

    def collect(value: Any, index: int) -> None:
        if isinstance(value, list):
            for part in value:
                collect(part, index)
        if not isinstance(value, dict):
            return
        index = value.get("index", index) if isinstance(value.get("index"), int) else index
        for name, part in value.items():
            if name in _TEXTS and isinstance(part, str):
                texts[index] = texts.get(index, "") + part
            elif name in _ENDS and part is not None:
                ends.append(f"{index} {name} {json.dumps(part)}")
            else:
                collect(part, index)

    for line in body.decode().splitlines():
        document = line.removeprefix("data: ").strip()
        if document.startswith("{"):
            collect(json.loads(document), 0)
    return (*(text for _, text in sorted(texts.items())), *sorted(set(ends)))


class Neighbours:
    """Sends good requests over some connections at once and compares the answers."""

    def __init__(self, port: int, *, has_model: bool) -> None:
        """`has_model`: a greedy answer follows from its prompt; the null device's is of a random seed."""
        self.port = port
        self.cases = tuple(case for case in GOOD if has_model or not case.needs_model)
        self.expected: dict[str, tuple[str, ...]] = {}
        self.num_right = 0
        self.wrong: list[str] = []
        self.slowest_s = 0.0

    async def learn(self) -> None:
        """Asks each once, on a quiet server."""
        for case in self.cases:
            reply = await exchange(self.port, case.request())
            assert reply.status == 200 and any(essence(reply.body)), (case.name, reply.status, reply.body)
            self.expected[case.name] = essence(reply.body)

    async def ask(self, case: Case) -> None:
        """One good request."""
        begin = time.perf_counter()
        try:
            reply = await exchange(self.port, case.request())
        except Exception as error:  # counted, with its kind: the caller wants all of them
            self.wrong.append(f"{case.name}: {error!r}")
            return
        self.slowest_s = max(self.slowest_s, time.perf_counter() - begin)
        if reply.status == 200 and essence(reply.body) == self.expected[case.name]:
            self.num_right += 1
        else:
            self.wrong.append(f"{case.name}: {reply.status} {reply.body[:500]!r}")

    async def run(self, stop: asyncio.Event, connections: int = 2, pause_s: float = 0.0) -> None:
        """Asks one after the other over each connection until `stop` is set; each case at least once."""

        async def client(first: int) -> None:
            count = 0
            while not stop.is_set() or count < len(self.cases):
                await self.ask(self.cases[(first + count) % len(self.cases)])
                count += 1
                await asyncio.sleep(pause_s)

        async with asyncio.TaskGroup() as tasks:
            for i in range(connections):
                tasks.create_task(client(i * len(self.cases) // connections))

"""Requests that cost much are refused or answered, and the event loop serves the others meanwhile."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from runtime import gil
from runtime.http.app import http_app
from runtime.http.native.generate import generate
from runtime.http.native.info import DetokenizeBody, text_of
from runtime.http.openai.chat import chat as serve_chat
from runtime.http.openai.completions import completions
from runtime.http.streaming.large import GROUP
from tests.hostile.attack import attack
from tests.hostile.case import chat, dump, text
from tests.hostile.costly import ANSWERS, BODIES, COSTLY, TEXTS
from tests.hostile.target import NULL, Target, target
from tests.http.fake import FakeService

CONTEXT = 32_768
NUM_ROWS = 1500  # tokens with log probabilities in each of the large answers, at least
AT_LEAST = 10  # times that the event loop does something else while one large answer is written


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    options = ("--json-model-override-args", json.dumps({"max_position_embeddings": CONTEXT}))
    folder: Path = tmp_path_factory.mktemp("costs")
    with target(folder, *NULL, *options, "--context-length", str(CONTEXT)) as running:
        yield running


def test_the_corpus_has_names_of_its_own() -> None:
    assert len({case.name for case in COSTLY}) == len(COSTLY)


@pytest.mark.full
def test_each_costly_request_gets_its_answer(server: Target) -> None:
    assert not asyncio.run(attack(server.port, COSTLY, at_once=4))
    assert not server.bugs()


def test_costly_requests_are_refused_at_once(server: Target) -> None:
    """Those that are refused before anything is computed; the others take longer than a test should."""
    refused = [case for case in (*ANSWERS, *BODIES, *TEXTS) if 200 not in case.status]
    assert not asyncio.run(attack(server.port, refused[::4], at_once=2))
    assert not server.bugs()


class Ticks:
    """Counts how often the event loop comes round."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        while True:
            await anyio.sleep(0)
            self.count += 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    "serve, body",
    [
        (serve_chat, chat(n=16, logprobs=True, top_logprobs=20, max_tokens=100)),
        (completions, text(n=16, logprobs=20, max_tokens=100)),
        (completions, text(prompt=[7] * 1500, prompt_logprobs=20)),
        (
            generate,
            dump(
                {
                    "input_ids": [5] * 1500,
                    "return_logprob": True,
                    "logprob_start_len": 0,
                    "top_logprobs_num": 20,
                    "sampling_params": {"max_new_tokens": 50},
                }
            ),
        ),
    ],
)
async def test_large_answers_leave_the_event_loop_free(
    serve: Callable[..., Any], body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same JSON as on the event loop, written while the loop goes on: a few rows between two pauses."""
    pauses: list[float] = []
    monkeypatch.setattr(gil, "RUN_S", 0.0)  # a pause wherever one is possible
    monkeypatch.setattr(gil, "sleep", pauses.append)
    service = FakeService()
    answer = serve(service, body)
    assert answer.is_large
    ticks = Ticks()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ticks.run)
        await anyio.sleep(0)
        large = await answer.complete()
        tasks.cancel_scope.cancel()
    assert isinstance(large, msgspec.Raw) and len(large) > 2**18
    assert ticks.count > AT_LEAST
    assert len(pauses) >= NUM_ROWS / GROUP
    small = serve(service, body)
    small.is_large = False
    assert without_times(json.loads(bytes(large))) == without_times(
        json.loads(msgspec.json.encode(await small.complete()))
    )


def without_times(value: Any) -> Any:
    """A JSON value without ids and times, which differ from request to request."""
    if isinstance(value, dict):
        left_out = ("id", "created", "e2e_latency")
        return {name: without_times(one) for name, one in value.items() if name not in left_out}
    return [without_times(one) for one in value] if isinstance(value, list) else value


@pytest.mark.anyio
async def test_there_are_pauses_between_the_texts_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(gil, "RUN_S", 0.0)
    monkeypatch.setattr(gil, "sleep", pauses.append)
    await text_of(FakeService(), DetokenizeBody(tokens=[[7]] * 2000))
    assert len(pauses) >= 2000


@pytest.mark.anyio
@pytest.mark.parametrize(
    "path, body",
    [
        ("/tokenize", {"prompt": ["a" * 100] * 1024}),
        ("/detokenize", {"tokens": [7] * 100_000}),
        ("/detokenize", {"tokens": [[7]] * 100_000}),
        ("/tokenize", {"prompt": "a" * 20_000, "return_token_strs": True}),
    ],
)
async def test_texts_leave_the_event_loop_free(path: str, body: dict[str, Any]) -> None:
    sent: list[dict[str, Any]] = []
    content = dump(body)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "headers": [],
        "query_string": b"",
        "http_version": "1.1",
    }
    ticks = Ticks()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ticks.run)
        await anyio.sleep(0)
        await http_app(FakeService())(scope, receive, send)  # type: ignore[arg-type]
        tasks.cancel_scope.cancel()
    assert sent[0]["status"] == 200 and ticks.count > 1

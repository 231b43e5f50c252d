"""Hidden states in answers: the same in a stream and in one piece, and computed outside of the event loop,
which many would hold up."""

import json
import threading
from typing import Any

import httpx
import numpy as np
import pytest

from runtime.http.app import http_app
from runtime.http.fields import hidden_states as hidden
from runtime.http.settings import HttpSettings
from tests.http.fake import FakeService
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4,
    "n": 2,
    "return_hidden_states": True,
}
GENERATE: dict[str, Any] = {
    "text": "hi",
    "sampling_params": {"max_new_tokens": 4},
    "return_hidden_states": True,
}
PROMPT = [[0.0, -1.0], [1.0, -1.0]]
ROWS = [[2.0, -1.0], [3.0, -1.0], [4.0, -1.0]]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that have encoded hidden states."""
    seen: set[int] = set()
    write = hidden.row_json

    def encoded(row: np.ndarray) -> hidden.Row:
        seen.add(threading.get_ident())
        return write(row)

    monkeypatch.setattr(hidden, "row_json", encoded)
    return seen


def events(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


async def answer_text(path: str, body: dict[str, Any], *, is_disjoint: bool = False) -> str:
    settings = HttpSettings(stream_output=is_disjoint)
    async with (
        serving(http_app(FakeService(), settings)) as (host, port),
        httpx.AsyncClient(base_url=f"http://{host}:{port}") as http,
    ):
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.text


async def test_native_streams_report_them_at_the_end_or_as_they_come(threads: set[int]) -> None:
    whole = json.loads(await answer_text("/generate", GENERATE))
    assert whole["meta_info"]["hidden_states"] == [PROMPT, *ROWS]
    stream = events(await answer_text("/generate", GENERATE | {"stream": True}))
    assert stream[-1]["meta_info"]["hidden_states"] == [PROMPT, *ROWS] and stream[-1]["text"] == whole["text"]
    pieces = events(await answer_text("/generate", GENERATE | {"stream": True}, is_disjoint=True))
    states_of = [states for piece in pieces for states in piece["meta_info"].get("hidden_states", ())]
    assert states_of == [PROMPT, *ROWS] and "".join(piece["text"] for piece in pieces) == whole["text"]
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize("is_stream", [False, True])
async def test_chats_report_the_last(threads: set[int], is_stream: bool) -> None:
    text = await answer_text("/v1/chat/completions", CHAT | {"stream": is_stream})
    if is_stream:
        choices = [choice for event in events(text) for choice in event["choices"]]
        deltas = [choice["delta"] for choice in choices]
        states_of = [delta["hidden_states"] for delta in deltas if "hidden_states" in delta]
    else:
        states_of = [choice["hidden_states"] for choice in json.loads(text)["choices"]]
    assert len(states_of) == 2 and all(states[1] == -1.0 and states[0] > 1.0 for states in states_of)
    assert threads and threading.get_ident() not in threads

"""SGLang's fields of halves in bodies (bootstrap_host, bootstrap_port, bootstrap_room): they count with the
key as bearer token, and open nothing without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import runtime
from tests.e2e.conftest import Generate
from tests.e2e.disaggregated import COUNT, FULL, KEY, PROMPT, counts, key_options, server

pytestmark = pytest.mark.anyio

Checkpoint = Callable[[str], Path]
BEARER = {"authorization": f"Bearer {KEY.decode()}"}


def client_of(engine: runtime.Engine) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(engine.asgi())  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)


def bodies(fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A prompt for each API, of its own, with these fields."""
    params = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
    text = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return [
        ("/generate", {"input_ids": PROMPT, "sampling_params": params, **fields}),
        ("/v1/completions", {"prompt": [1, *PROMPT[1:]], **text, **fields}),
        ("/v1/chat/completions", {"messages": [], "input_ids": [2, *PROMPT[1:]], **text, **fields}),
    ]


def tokens_of(answer: Any) -> list[int]:
    return answer["output_ids"] if "output_ids" in answer else answer["choices"][0]["token_ids"]


async def test_a_router_with_the_key(checkpoint: Checkpoint, reference: Generate, tmp_path: Path) -> None:
    options, model = key_options(tmp_path, KEY), checkpoint("qwen3")
    async with (
        server("prefill", model, **options) as (first, _),
        server("decode", model, **options) as (second, _),
    ):
        assert first._core._halves is not None
        async with client_of(first) as prefill, client_of(second) as decode:
            for room in range(3):
                fields = {
                    "bootstrap_host": "127.0.0.1",
                    "bootstrap_port": first._core._halves.port,
                    "bootstrap_room": room,
                }
                path, body = bodies(fields)[room]
                if path.startswith("/v1/chat"):
                    body["messages"] = [{"role": "user", "content": "x"}]
                answers: list[httpx.Response] = []

                async def answer(path: str = path, body: Any = body, answers: Any = answers) -> None:
                    answers.append(await decode.post(path, json=body, headers=BEARER))

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(answer)
                    prompt = await prefill.post(path, json=body, headers=BEARER)
                assert (prompt.status_code, answers[0].status_code) == (200, 200), answers[0].text
                assert len(tokens_of(prompt.json())) == 1
                given = body.get("input_ids") or body["prompt"]
                assert tokens_of(answers[0].json()) == reference("qwen3", given, COUNT), path
                assert counts(second).pages == (room + 1) * FULL // 16 and not counts(second).failures


async def test_others_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    options, model = key_options(tmp_path, KEY), checkpoint("qwen3")
    fields = {"bootstrap_host": "169.254.169.254", "bootstrap_port": 80, "bootstrap_room": 1}
    async with server("decode", model, **options) as (engine, _), client_of(engine) as client:
        for headers in ({}, {"authorization": "Bearer other"}, {"authorization": f"Basic {KEY.decode()}"}):
            for path, body in bodies(fields)[:2]:
                refused = await client.post(path, json=body, headers=headers)
                assert refused.status_code == 403, refused.text
                assert refused.json()["error"]["param"] == "bootstrap_room"
        path, body = bodies({})[0]
        for wrong, param in (
            ({"bootstrap_host": "a"}, "bootstrap_room"),
            ({"bootstrap_room": 1, "bootstrap_host": ""}, "bootstrap_host"),
            ({"bootstrap_room": -1}, "bootstrap_room"),
            ({"bootstrap_room": [1, 2]}, "bootstrap_room"),
            ({"bootstrap_room": 1, "bootstrap_host": "a", "bootstrap_port": 0}, "bootstrap_port"),
            ({**fields, "input_ids": [PROMPT, PROMPT]}, "bootstrap_room"),
        ):
            refused = await client.post(path, json=body | wrong, headers=BEARER)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        assert not counts(engine).fetches
    del options["disaggregation_key_file"], options["disaggregation_bootstrap_port"]
    async with runtime.Engine(model_path=str(model), **options) as engine, client_of(engine) as client:
        refused = await client.post(path, json=body | fields, headers=BEARER)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "bootstrap_room")

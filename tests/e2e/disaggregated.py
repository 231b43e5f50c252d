"""Servers that compute prompts and answers for each other."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx

import runtime
from runtime.messages.transfer import Transfer
from runtime.transfer.key import HEADER, header_value

KEY = b"0123456789abcdef0123456789abcdef"
PROMPT = [(7 * i + i * i // 3) % 250 for i in range(100)]  # six full pages and four tokens
FULL = 96
COUNT = 6
TWO: dict[str, Any] = {"tensor_parallel_size": 2}


def key_options(folder: Path, key: bytes) -> dict[str, Any]:
    """Options of a small server with this key."""
    file = folder / "key"
    file.write_bytes(key)
    file.chmod(0o600)
    return {
        "disaggregation_key_file": str(file),
        "disaggregation_bootstrap_port": 0,
        "num_threads": 1,
        "context_length": 512,
        "max_total_tokens": 1024,
        "dtype": "float32",
        "page_size": 16,
    }


class Client:
    """Sends halves of requests to an engine."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def post(self, body: dict[str, Any], transfer: Transfer | None) -> Any:
        """-> the answer of /generate"""
        headers = {} if transfer is None else {HEADER: header_value(KEY, transfer)}
        answer = await self._client.post("/generate", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def __call__(self, prompt: list[int], transfer: Transfer | None, count: int = COUNT) -> Any:
        """-> greedy tokens, and how many of the prompt were cached"""
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body = await self.post({"input_ids": prompt, "sampling_params": params}, transfer)
        return body["output_ids"], body["meta_info"]["cached_tokens"]


@asynccontextmanager
async def server(mode: str, model: Path, **options: Any) -> AsyncIterator[tuple[runtime.Engine, Client]]:
    """-> an engine of this mode, and what sends it halves"""
    async with runtime.Engine(model_path=str(model), disaggregation_mode=mode, **options) as engine:
        transport = httpx.ASGITransport(engine.asgi())  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver", timeout=60) as client:
            yield engine, Client(client)


def source_of(engine: runtime.Engine) -> str:
    assert engine._core._halves is not None
    return f"127.0.0.1:{engine._core._halves.port}"


async def both(
    prefill: tuple[runtime.Engine, Client],
    decode: Client,
    prompt: list[int],
    room: int = 1,
    count: int = COUNT,
) -> Any:
    """Sends both halves at once, the one that waits for the other first. -> the answer of the second"""
    answers: list[Any] = []

    async def answer() -> None:
        answers.append(await decode(prompt, Transfer(room, source_of(prefill[0])), count))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer)
        await anyio.sleep(0.01)
        first, _ = await prefill[1](prompt, Transfer(room))
        assert len(first) == 1, "the prompt, and one token"
    return answers[0]


def counts(engine: runtime.Engine) -> Any:
    pages = engine._core.replicas[0].pages
    assert pages is not None
    return pages.received

"""Hidden states out and embeddings in, against transformers, whatever the schedule."""

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime import Engine
from runtime.errors import InvalidRequest
from runtime.messages.requests import Embeds

pytestmark = pytest.mark.anyio

COUNT = 12
SHARED = list(range(10, 50))
PROMPTS = [SHARED + [60, 61], SHARED + [70], [5], SHARED[:20] + [7, 8, 9]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 2048,
    "enable_return_hidden_states": True,
}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": COUNT}
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}

# what must not matter
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "page size 1, chunk 7": {"page_size": 1, "chunked_prefill_size": 7},
    "page size 5, one step in flight": {"page_size": 5, "disable_overlap_schedule": True},
    "few pages: sequences give way": {"page_size": 4, "max_total_tokens": 64, "chunked_prefill_size": 16},
}


class Whole:
    """transformers' answers about one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> np.ndarray:
        return self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0].numpy()

    @torch.inference_mode()
    def embedded(self, embeds: np.ndarray, count: int) -> list[int]:
        """Greedy tokens after a prompt of embeddings."""
        rows, tokens = torch.from_numpy(embeds)[None], []
        for _ in range(count):
            tokens.append(int(self.model(inputs_embeds=rows).logits[0, -1].argmax()))
            rows = torch.cat((rows, self.model.get_input_embeddings()(torch.tensor([tokens[-1:]]))), dim=1)
        return tokens


@pytest.fixture(scope="session")
def whole(checkpoint: Callable[[str], Path]) -> Callable[[str], Whole]:
    return cache(lambda family: Whole(checkpoint(family)))


def random_embeds(seed: int, length: int, width: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(length, width)).astype(np.float32)


async def all_at_once(*jobs: Callable[[], Any]) -> None:
    async with anyio.create_task_group() as tasks:
        for job in jobs:
            tasks.start_soon(job)


async def check_states(engine: Engine, whole: Whole) -> None:
    """Of all tokens and of the last one, in company."""

    async def one(prompt: list[int], requested: str) -> None:
        answer = await engine.generate(prompt, hidden_states=requested, **GREEDY)
        expected = whole.states(prompt + answer.token_ids[:-1])
        assert answer.hidden_states is not None
        np.testing.assert_allclose(
            answer.hidden_states, expected if requested == "all" else expected[-1:], **CLOSE
        )

    async def plain() -> None:
        answer = await engine.generate(PROMPTS[0], **GREEDY)
        assert answer.hidden_states is None

    jobs = [
        lambda prompt=prompt, requested=requested: one(prompt, requested)
        for prompt in PROMPTS
        for requested in ("all", "last")
    ]
    await all_at_once(*jobs, plain)


@pytest.mark.parametrize(
    ("setting", "family"),
    [
        *((setting, "qwen3") for setting in SETTINGS),
        ("page size 1, chunk 7", "deepseek_v3"),
        ("plain", "llama"),
    ],
)
async def test_hidden_states(
    setting: str, family: str, checkpoint: Callable[[str], Path], whole: Callable[[str], Whole]
) -> None:
    async with Engine(model_path=str(checkpoint(family)), **(OPTIONS | SETTINGS[setting])) as engine:
        await check_states(engine, whole(family))
        await check_states(engine, whole(family))  # with what the first round left in the prefix cache
        if "give way" in setting:
            assert b"runtime_preemptions_total 0\n" not in engine.metrics()


async def check_embeds(engine: Engine, whole: Whole) -> None:
    async def one(embeds: np.ndarray, ids: list[int] | None) -> None:
        answer = await engine.generate(embeds if ids is None else Embeds(embeds, ids), **GREEDY)
        assert answer.token_ids == whole.embedded(embeds, COUNT)
        assert answer.finish is not None and answer.finish.prompt_tokens == len(embeds)

    async def tokens() -> None:
        embeds = whole.model.get_input_embeddings()(torch.tensor(SHARED)).detach().numpy()
        assert (await engine.generate(embeds, **GREEDY)).token_ids == (
            await engine.generate(np.array(SHARED), **GREEDY)
        ).token_ids

    requests = [
        (random_embeds(1, 40), None),
        (random_embeds(2, 40), None),
        (random_embeds(2, 40), SHARED),
        (random_embeds(3, 1), None),
    ]
    await all_at_once(*[lambda requested=requested: one(*requested) for requested in requests], tokens)


@pytest.mark.parametrize(
    ("setting", "family"), [*((setting, "qwen3") for setting in SETTINGS), ("plain", "deepseek_v3")]
)
async def test_embeddings(
    setting: str, family: str, checkpoint: Callable[[str], Path], whole: Callable[[str], Whole]
) -> None:
    async with Engine(model_path=str(checkpoint(family)), **(OPTIONS | SETTINGS[setting])) as engine:
        await check_embeds(engine, whole(family))
        await check_embeds(engine, whole(family))


async def test_two_ranks(checkpoint: Callable[[str], Path], whole: Callable[[str], Whole]) -> None:
    async with Engine(model_path=str(checkpoint("llama")), tensor_parallel_size=2, **OPTIONS) as engine:
        await check_states(engine, whole("llama"))
        await check_embeds(engine, whole("llama"))


async def test_a_rank_dies(checkpoint: Callable[[str], Path], whole: Callable[[str], Whole]) -> None:
    """What was streamed stays, what was on its way is computed again."""
    async with Engine(model_path=str(checkpoint("llama")), chunked_prefill_size=7, **OPTIONS) as engine:
        prompt, embeds = PROMPTS[0], random_embeds(4, 30)
        params: dict[str, Any] = GREEDY | {"max_new_tokens": 80}
        rows: list[np.ndarray] = []
        tokens: list[int] = []
        other: list[int] = []

        async def streamed() -> None:
            async for delta in engine.stream(prompt, hidden_states="all", **params):
                rows.extend(delta.hidden or [])
                tokens.extend(delta.token_ids)
                if len(tokens) == 5:
                    os.kill(engine._core.replicas[0].supervisor.ranks.pids[0], signal.SIGKILL)

        async def embedded() -> None:
            other.extend((await engine.generate(embeds, **params)).token_ids)

        await all_at_once(streamed, embedded)
    np.testing.assert_allclose(np.concatenate(rows), whole("llama").states(prompt + tokens[:-1]), **CLOSE)
    assert other == whole("llama").embedded(embeds, 80)


@asynccontextmanager
async def posting(folder: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with Engine(model_path=str(folder), **(OPTIONS | options)) as engine:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(engine.asgi()), base_url="http://here", timeout=60
        ) as client:
            yield client


def events(response: httpx.Response) -> list[Any]:
    return [msgspec.json.decode(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]


def flat(states: list[Any]) -> np.ndarray:
    """SGLang's form as one row for each token."""
    return np.array([*states[0], *states[1:]])


async def test_over_http(checkpoint: Callable[[str], Path], whole: Callable[[str], Whole]) -> None:
    async with posting(checkpoint("llama")) as client:
        body: dict[str, Any] = {
            "input_ids": PROMPTS[:2],
            "sampling_params": GREEDY,
            "return_hidden_states": [True, "last"],
        }
        one, two = (await client.post("/generate", json=body)).json()
        expected = whole("llama").states(PROMPTS[0] + one["output_ids"][:-1])
        states = one["meta_info"]["hidden_states"]
        assert len(states) == COUNT and len(states[0]) == len(PROMPTS[0])
        np.testing.assert_allclose(flat(states), expected, **CLOSE)
        last = whole("llama").states(PROMPTS[1] + two["output_ids"][:-1])[-1]
        np.testing.assert_allclose(two["meta_info"]["hidden_states"], last, **CLOSE)

        streamed = events(await client.post("/generate", json=body | {"stream": True}))
        ends = {
            event["index"]: event["meta_info"] for event in streamed if event["meta_info"]["finish_reason"]
        }
        np.testing.assert_allclose(flat(ends[0]["hidden_states"]), expected, **CLOSE)
        np.testing.assert_allclose(ends[1]["hidden_states"], last, **CLOSE)
        assert all(
            "hidden_states" not in event["meta_info"]
            for event in streamed
            if not event["meta_info"]["finish_reason"]
        )

        chat = {"messages": [{"role": "user", "content": ""}], "input_ids": PROMPTS[1]}
        for path, more in (("/v1/completions", {"prompt": PROMPTS[1]}), ("/v1/chat/completions", chat)):
            body = more | {
                "temperature": 0,
                "ignore_eos": True,
                "max_tokens": COUNT,
                "return_hidden_states": True,
            }
            choice = (await client.post(path, json=body)).json()["choices"][0]
            np.testing.assert_allclose(choice["hidden_states"], last, **CLOSE)
            chunk = events(await client.post(path, json=body | {"stream": True}))[-1]["choices"][0]
            assert chunk["finish_reason"] == "length"
            np.testing.assert_allclose(chunk.get("delta", chunk)["hidden_states"], last, **CLOSE)

        rows = [random_embeds(5, 9).tolist(), random_embeds(6, 4).tolist()]
        body = {"input_embeds": rows, "sampling_params": GREEDY}
        answers = (await client.post("/generate", json=body)).json()
        assert [answer["output_ids"] for answer in answers] == [
            whole("llama").embedded(np.array(row, np.float32), COUNT) for row in rows
        ]
        single = (
            await client.post("/generate", json=body | {"input_embeds": rows[0], "input_ids": [1] * 9})
        ).json()
        assert single["output_ids"] == answers[0]["output_ids"]


async def test_refusals(checkpoint: Callable[[str], Path]) -> None:
    async with posting(checkpoint("llama"), enable_return_hidden_states=False) as client:

        async def refused(param: str, words: str, path: str = "/generate", **body: Any) -> None:
            response = await client.post(path, content=msgspec.json.encode(body))
            error = response.json()["error"]
            assert response.status_code == 400 and error["param"] == param and words in error["message"], (
                error
            )

        row = [0.0] * 64
        await refused(
            "return_hidden_states", "--enable-return-hidden-states", text="a", return_hidden_states=True
        )
        await refused(
            "return_hidden_states",
            "--enable-return-hidden-states",
            "/v1/completions",
            prompt="a",
            return_hidden_states=True,
        )
        await refused(
            "input_embeds", "row 1 has 3 numbers; this model takes 64", input_embeds=[row, [0.0] * 3]
        )
        await refused("input_embeds", "row 0 has 0 numbers", input_embeds=[[]])
        await refused("input_embeds", "infinite", input_embeds=[[1e39] + row[1:]])
        await refused("input_embeds", "row 0 is not", input_embeds=[["a"] * 64])
        await refused("input_embeds", "list of rows", input_embeds=[1.0])
        await refused("input_embeds", "257 rows", input_embeds=[row] * 257)
        await refused("input_embeds", "1 rows for 2 input_ids", input_embeds=[row], input_ids=[1, 2])
        await refused("input_ids", "token ids must be in", input_embeds=[row], input_ids=[10**6])
        await refused("text", "either", input_embeds=[row], text="a")
        await refused(
            "top_logprobs_num", "give input_ids", input_embeds=[row], return_logprob=True, logprob_start_len=0
        )


async def test_the_library_refuses(checkpoint: Callable[[str], Path]) -> None:
    async with Engine(model_path=str(checkpoint("llama")), **OPTIONS) as engine:
        for wrong in (
            np.zeros(64),
            np.zeros((2, 63)),
            np.full((1, 64), np.nan),
            np.full((1, 64), 1e300),
            np.full((1, 64), None),
            np.array(3.0),
        ):
            with pytest.raises(InvalidRequest, match="input_embeds"):
                await engine.generate(wrong)


async def test_bits_do_not_depend_on_neighbours_with_embeddings(
    checkpoint: Callable[[str], Path], whole: Callable[[str], Whole]
) -> None:
    """What a prompt of tokens gets does not depend on neighbours that bring embeddings; and embeddings of
    tokens get what the tokens get."""
    model = whole("qwen3").model
    async with Engine(model_path=str(checkpoint("qwen3")), **OPTIONS) as engine:

        async def chances(prompt: Any) -> list[float]:
            answer = await engine.generate(prompt, **(GREEDY | {"logprobs": True}))
            return [token.logprob for token in answer.logprobs]

        alone = [await chances(prompt) for prompt in PROMPTS]
        for index, prompt in enumerate(PROMPTS):
            async with anyio.create_task_group() as tasks:
                for seed in range(8):
                    tasks.start_soon(chances, random_embeds(seed, 40))
                assert await chances(prompt) == alone[index]
            own = model.get_input_embeddings()(torch.tensor(prompt)).detach().numpy()
            assert await chances(own) == alone[index]

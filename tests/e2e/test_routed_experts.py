"""The experts that computed each token, against the routers of transformers, whatever the schedule."""

import base64
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime import Engine
from runtime.errors import InvalidRequest

pytestmark = pytest.mark.anyio

SHARED = list(range(10, 50))
PROMPTS = [SHARED + [60, 61], SHARED + [70], [5]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 2048,
    "enable_return_routed_experts": True,
}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12}


class Routers:
    """The choices of transformers' routers in one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.top_k = self.model.config.num_experts_per_tok
        self.chosen: dict[int, np.ndarray] = {}
        for index, layer in enumerate(self.model.model.layers):
            if (gate := getattr(layer.mlp, "gate", None)) is not None:
                gate.register_forward_hook(
                    lambda _, given, found, index=index: self.chosen.update({index: found[2].numpy()})
                )

    @torch.inference_mode()
    def experts(self, tokens: list[int]) -> np.ndarray:
        """int32 [tokens, layers, experts of a token], those of a token in ascending order."""
        self.model(torch.tensor([tokens]))
        found = np.zeros((len(tokens), len(self.model.model.layers), self.top_k), np.int32)
        for index, ids in self.chosen.items():
            found[:, index] = np.sort(ids, axis=1)
        return found


@pytest.fixture(scope="session")
def routers(checkpoint: Callable[[str], Path]) -> Callable[[str], Routers]:
    return cache(lambda family: Routers(checkpoint(family)))


async def check(engine: Engine, expected: Routers) -> None:
    async def one(prompt: list[int], start: int) -> None:
        answer = await engine.generate(prompt, routed_experts=start, **GREEDY)
        wanted = expected.experts(prompt + answer.token_ids[:-1])[start:]
        assert answer.routed_experts is not None and answer.routed_experts.dtype == np.int32
        np.testing.assert_array_equal(np.sort(answer.routed_experts.reshape(wanted.shape), axis=2), wanted)

    async def plain() -> None:
        assert (await engine.generate(PROMPTS[0], **GREEDY)).routed_experts is None

    async with anyio.create_task_group() as tasks:
        for prompt in PROMPTS:
            for start in {0, len(prompt)}:
                tasks.start_soon(one, prompt, start)
        tasks.start_soon(plain)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {}),
        ("deepseek_v3", {"page_size": 1, "chunked_prefill_size": 7}),
        ("qwen3_moe", {"tensor_parallel_size": 2, "speculative_algorithm": "NGRAM"}),
    ],
    ids=["plain", "chunks", "two ranks and drafts"],
)
async def test_experts_are_those_of_transformers(
    family: str, options: dict[str, Any], checkpoint: Callable[[str], Path], routers: Callable[[str], Routers]
) -> None:
    async with Engine(model_path=str(checkpoint(family)), **(OPTIONS | options)) as engine:
        await check(engine, routers(family))
        await check(engine, routers(family))  # with prefixes in the cache


async def test_a_sequence_that_gives_way_keeps_what_was_reported(
    checkpoint: Callable[[str], Path], routers: Callable[[str], Routers]
) -> None:
    """Its tokens are computed again, and reported once."""
    async with Engine(model_path=str(checkpoint("qwen3_moe")), **OPTIONS) as engine:
        stream = engine.stream([5, 6, 7], routed_experts=0, **(GREEDY | {"max_new_tokens": 80}))
        delta = await anext(stream)
        tokens = delta.token_ids
        await engine.pause_generation("retract")
        assert engine.load().running == 0 and engine.load().waiting == 1
        await engine.continue_generation()
        async for delta in stream:
            tokens += delta.token_ids
        wanted = routers("qwen3_moe").experts([5, 6, 7, *tokens[:-1]])
        assert delta.experts is not None
        found = np.concatenate(delta.experts).reshape(wanted.shape)
        np.testing.assert_array_equal(np.sort(found, axis=2), wanted)


async def test_every_api_and_what_is_refused(
    checkpoint: Callable[[str], Path], routers: Callable[[str], Routers]
) -> None:
    folder = checkpoint("qwen3_moe")
    async with Engine(model_path=str(folder), **OPTIONS) as engine:
        transport = httpx.ASGITransport(engine.asgi())
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:
            asked = {"return_routed_experts": True, "routed_experts_start_len": 1}
            params = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
            body = {"input_ids": [5, 6, 7], "sampling_params": params} | asked
            found = (await client.post("/generate", json=body)).json()
            shape = (4, len(routers("qwen3_moe").model.model.layers), routers("qwen3_moe").top_k)
            meta = found["meta_info"]
            ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).reshape(shape)
            wanted = routers("qwen3_moe").experts([5, 6, 7, *found["output_ids"][:-1]])[1:]
            np.testing.assert_array_equal(np.sort(ids, axis=2), wanted)
            assert meta["routed_experts_start_len"] == 1
            text = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "ignore_eos": True} | asked
            completion = (await client.post("/v1/completions", json=text)).json()
            assert completion["sglext"] == {"routed_experts": meta["routed_experts"]}
            stream = (await client.post("/v1/completions", json=text | {"stream": True})).text
            assert stream.count(meta["routed_experts"]) == 1
            for more, param in (({"n": 2}, "return_routed_experts"), ({"prompt": [[5], [6]]}, None)):
                refused = await client.post("/v1/completions", json=text | more)
                assert refused.status_code == 400, refused.text
                assert refused.json()["error"]["param"] == (param or "return_routed_experts")
            late = await client.post("/generate", json=body | {"routed_experts_start_len": 4})
            assert late.status_code == 400 and "behind the prompt's 3 tokens" in late.text


async def test_without_the_option_it_is_refused(checkpoint: Callable[[str], Path]) -> None:
    options = OPTIONS | {"enable_return_routed_experts": False}
    async with Engine(model_path=str(checkpoint("qwen3_moe")), **options) as engine:
        with pytest.raises(InvalidRequest, match="--enable-return-routed-experts"):
            await engine.generate([5], routed_experts=0)

"""Greedy output equals transformers, token for token, whatever the schedule. Through the library face, real
ranks, real rings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from tests.e2e.conftest import Generate

pytestmark = pytest.mark.anyio

COUNT = 12
SHARED = list(range(10, 50))
PROMPTS = [SHARED + [60, 61], SHARED + [70], list(range(100, 105)), SHARED[:20] + [7, 8, 9], [5]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 2048,
}

# what must not matter
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "page size 1, chunk 7": {"page_size": 1, "chunked_prefill_size": 7},
    "page size 5, one step in flight": {"page_size": 5, "disable_overlap_schedule": True},
    "no prefix cache": {"disable_radix_cache": True, "chunked_prefill_size": 16},
    "alone": {"max_running_requests": 1},
    "few pages: sequences give way": {"page_size": 4, "max_total_tokens": 72},
}


async def run_all(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    outputs: list[list[int]] = [[]] * len(prompts)

    async def one(i: int) -> None:
        outputs[i] = (
            await engine.generate(
                prompts[i], temperature=0, ignore_eos=True, max_new_tokens=COUNT, **sampling
            )
        ).token_ids

    async with anyio.create_task_group() as tasks:
        for i in range(len(prompts)):
            tasks.start_soon(one, i)
    return outputs


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
)
async def test_families(family: str, checkpoint: Callable[[str], Path], reference: Generate) -> None:
    async with Engine(model_path=str(checkpoint(family)), **OPTIONS) as engine:
        outputs = await run_all(engine, PROMPTS)
    assert outputs == [reference(family, prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("setting", "family"),
    [
        *((setting, "qwen3") for setting in SETTINGS),
        *((setting, "deepseek_v3") for setting in SETTINGS if "page" in setting),
        ("page size 1, chunk 7", "qwen3_moe"),
        ("few pages: sequences give way", "qwen2_moe"),
    ],
)
async def test_settings(
    setting: str, family: str, checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    expected = [reference(family, prompt, COUNT) for prompt in PROMPTS]
    async with Engine(model_path=str(checkpoint(family)), **(OPTIONS | SETTINGS[setting])) as engine:
        assert await run_all(engine, PROMPTS) == expected
        assert await run_all(engine, PROMPTS) == expected, (
            "with what the first round left in the prefix cache"
        )
        load = engine.load()
        assert load.running == load.waiting == 0 and load.used_pages == load.cached_pages
        if "give way" in setting:
            assert b"runtime_preemptions_total 0\n" not in engine.metrics()


@pytest.mark.parametrize(("family", "ep_size"), [("llama", 1), ("qwen3_moe", 2), ("deepseek_v3", 2)])
async def test_two_ranks(
    family: str, ep_size: int, checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    async with Engine(
        model_path=str(checkpoint(family)), tensor_parallel_size=2, expert_parallel_size=ep_size, **OPTIONS
    ) as engine:
        assert await run_all(engine, PROMPTS) == [reference(family, prompt, COUNT) for prompt in PROMPTS]


async def test_three_ranks_overlap(checkpoint: Callable[[str], Path], reference: Generate) -> None:
    """Four heads and two of keys and values on three ranks; steps are cut within prompts."""
    async with Engine(
        model_path=str(checkpoint("llama")),
        tensor_parallel_size=3,
        enable_two_batch_overlap=True,
        tbo_token_distribution_threshold=0.5,
        **OPTIONS,
    ) as engine:
        assert await run_all(engine, PROMPTS) == [reference("llama", prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize(("family", "mode"), [("qwen3_moe", "auto"), ("deepseek_v2", "normal")])
async def test_tokens_travel_to_experts(
    family: str, mode: str, checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    """In chunks and alone, and with what the first round left in the prefix cache."""
    async with Engine(
        model_path=str(checkpoint(family)),
        tensor_parallel_size=2,
        moe_a2a_backend="deepep",
        deepep_mode=mode,
        page_size=4,
        chunked_prefill_size=7,
        **OPTIONS,
    ) as engine:
        for _ in range(2):
            assert await run_all(engine, PROMPTS) == [reference(family, prompt, COUNT) for prompt in PROMPTS]


async def test_seeds_decide_and_nothing_else(checkpoint: Callable[[str], Path]) -> None:
    path = str(checkpoint("llama"))
    sampling: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.9,
        "seed": 42,
        "max_new_tokens": COUNT,
        "ignore_eos": True,
    }
    async with Engine(model_path=path, **OPTIONS) as engine:
        alone = (await engine.generate(PROMPTS[0], **sampling)).token_ids
        company: list[list[int]] = []

        async def other(i: int) -> None:
            company.append((await engine.generate(PROMPTS[i], **(sampling | {"seed": i}))).token_ids)

        async with anyio.create_task_group() as tasks:
            for i in range(1, 4):
                tasks.start_soon(other, i)
            again = (await engine.generate(PROMPTS[0], **sampling)).token_ids
    async with Engine(
        model_path=path, page_size=3, max_running_requests=2, disable_overlap_schedule=True, **OPTIONS
    ) as engine:
        elsewhere = (await engine.generate(PROMPTS[0], **sampling)).token_ids
    assert alone == again == elsewhere
    assert len({tuple(tokens) for tokens in [alone, *company]}) == 4

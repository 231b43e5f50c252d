"""The host tier end to end: a cache too small for what comes back, and every answer that of transformers."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from tests.e2e.conftest import Generate
from tests.metrics.read import sample

pytestmark = pytest.mark.anyio

COUNT = 6
PROMPTS = [[i, *range(10 + i, 50 + i)] for i in range(8)]  # 8 working sets of 12 pages
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 64,
    "page_size": 4,
    "max_total_tokens": 128,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
    "random_seed": 1,
}


async def ask(engine: Engine, i: int) -> tuple[list[int], int]:
    """-> tokens, and how many of the prompt's were not computed"""
    answer = await engine.generate(PROMPTS[i], temperature=0, ignore_eos=True, max_new_tokens=COUNT)
    assert answer.finish is not None
    return answer.token_ids, answer.finish.cached_tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hicache_mem_layout": "page_first", "hicache_write_policy": "write_back"},
        {"hicache_mem_layout": "page_first_kv_split", "hicache_write_policy": "write_through_selective"},
        {
            "hicache_mem_layout": "page_first_direct",
            "hicache_io_backend": "direct",
            "disable_overlap_schedule": True,
        },
    ],
)
async def test_prompts_come_back(
    options: dict[str, Any], checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    expected = [reference("llama", prompt, COUNT) for prompt in PROMPTS]
    async with Engine(model_path=str(checkpoint("llama")), **(OPTIONS | options)) as engine:
        for _ in range(2):
            for i in range(len(PROMPTS)):
                assert [(await ask(engine, i))[0] for _ in range(2)] == [expected[i]] * 2
        assert sample(engine.metrics(), "runtime_host_loaded_tokens_total") > 0
        answers: dict[int, list[int]] = {}

        async def one(i: int) -> None:
            answers[i] = (await ask(engine, i))[0]

        async with anyio.create_task_group() as tasks:
            for i in range(len(PROMPTS)):
                tasks.start_soon(one, i)
        assert [answers[i] for i in range(len(PROMPTS))] == expected, "loads beside decodes of others"


@pytest.mark.parametrize("family", ["bamba", "qwen3_next"])
@pytest.mark.parametrize(
    "options", [{}, {"hicache_write_policy": "write_back"}, {"tensor_parallel_size": 2}], ids=str
)
async def test_states_come_back(
    family: str, options: dict[str, Any], checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    """Recurrent layers continue a prompt from the state that was saved with its pages, also after the ranks
    died."""
    expected = [reference(family, prompt, COUNT) for prompt in PROMPTS]
    given = OPTIONS | {"max_mamba_cache_size": 4} | options
    async with Engine(model_path=str(checkpoint(family)), **given) as engine:
        for _ in range(2):
            for i in range(len(PROMPTS)):
                assert (await ask(engine, i))[0] == expected[i]
        found = [await ask(engine, i) for i in range(len(PROMPTS))]
        assert [tokens for tokens, _ in found] == expected and [cached for _, cached in found] == [40] * 8
        assert sample(engine.metrics(), "runtime_host_loaded_tokens_total") > 0
        if not options:
            os.kill(engine._core.replicas[0].supervisor.ranks.pids[-1], signal.SIGKILL)
            assert await ask(engine, 7) == (expected[7], 40)


@pytest.mark.parametrize("tp_size", [1, 2])
async def test_host_pages_survive_a_killed_rank(
    tp_size: int, checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    async with Engine(model_path=str(checkpoint("llama")), tensor_parallel_size=tp_size, **OPTIONS) as engine:
        for i in range(len(PROMPTS)):
            await ask(engine, i)
        loaded = sample(engine.metrics(), "runtime_host_loaded_tokens_total")
        os.kill(engine._core.replicas[0].supervisor.ranks.pids[-1], signal.SIGKILL)
        for i in range(len(PROMPTS)):
            tokens, cached = await ask(engine, i)
            assert tokens == reference("llama", PROMPTS[i], COUNT) and cached >= 36, (
                "read back from what the dead rank had saved"
            )
        assert engine._core.replicas[0].supervisor.generation == 2
        assert sample(engine.metrics(), "runtime_host_loaded_tokens_total") >= loaded + 36 * len(PROMPTS)


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"),
    [("qwen3", "fp8_e4m3"), ("deepseek_v3", "bfloat16"), ("deepseek_v2", "fp8_e5m2")],
)
async def test_narrow_pages(family: str, kv_cache_dtype: str, checkpoint: Callable[[str], Path]) -> None:
    """Whatever the pages round to, moves and prefix hits change nothing."""
    path, plain = (
        str(checkpoint(family)),
        OPTIONS | {"enable_hierarchical_cache": False, "hicache_ratio": 2.0},
    )
    async with Engine(
        model_path=path, **(plain | {"disable_radix_cache": True}), kv_cache_dtype=kv_cache_dtype
    ) as engine:
        expected = [(await ask(engine, i))[0] for i in range(len(PROMPTS))]
    async with Engine(model_path=path, **OPTIONS, kv_cache_dtype=kv_cache_dtype) as engine:
        for _ in range(2):
            assert [(await ask(engine, i))[0] for i in range(len(PROMPTS))] == expected
        assert sample(engine.metrics(), "runtime_host_loaded_tokens_total") > 0

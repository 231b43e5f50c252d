"""Data-parallel attention over gloo: every answer is that of transformers, whatever happens to a rank."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.errors import OptionsError
from tests.e2e.conftest import Generate
from tests.metrics.read import sample
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

pytestmark = pytest.mark.anyio

COUNT = 16
PROMPTS = [list(range(5, 17)), [3, 1, 4, 1, 5], list(range(40, 70)), [7] * 9, [1, 2, 3] * 4]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 96,
    "page_size": 4,
    "random_seed": 1,
    "max_running_requests": 4,
    "standby_ranks": 0,
    "enable_dp_attention": True,
    "data_parallel_size": 2,
    "tensor_parallel_size": 2,
    "load_balance_method": "round_robin",
}


async def ask(engine: Engine, prompt: list[int]) -> list[int]:
    answer = await engine.generate(prompt, temperature=0, ignore_eos=True, max_new_tokens=COUNT)
    return answer.token_ids


async def answers(engine: Engine) -> list[list[int]]:
    """Tokens of all prompts, asked for at once."""
    found: list[list[int]] = [[] for _ in PROMPTS]

    async def put(i: int) -> None:
        found[i] = await ask(engine, PROMPTS[i])

    async with anyio.create_task_group() as tasks:
        for i in range(len(PROMPTS)):
            tasks.start_soon(put, i)
    return found


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", {}, {}),
        ("qwen3_moe", {"mlp_only_layers": [0]}, {"moe_dense_tp_size": 1, "chunked_prefill_size": 7}),
        ("deepseek_v3", {}, {"tensor_parallel_size": 4, "expert_parallel_size": 4}),
    ],
    ids=str,
)
async def test_answers_are_those_of_transformers(
    family: str, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path, **sizes)
    reference = Reference(folder)
    expected = [reference.greedy(prompt, COUNT) for prompt in PROMPTS]
    async with Engine(model_path=str(folder), **(OPTIONS | options)) as engine:
        assert await answers(engine) == expected
        for i in (0, 1):  # by one group, then by the other, while each time the other one is idle
            assert await ask(engine, PROMPTS[i]) == expected[i]
        assert [replica.num_steps > 0 for replica in engine._core.replicas] == [True, True]

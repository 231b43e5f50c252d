"""Shards of the tokens between attentions over gloo: answers are those of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import Engine
from runtime.errors import OptionsError
from tests.e2e.conftest import Generate
from tests.e2e.greedy import greedy_at_once
from tests.e2e.test_context import COUNT, OPTIONS, PROMPTS
from tests.models.make import make_checkpoint

pytestmark = pytest.mark.anyio

SCATTERED: dict[str, Any] = OPTIONS | {"tensor_parallel_size": 2, "enable_attn_tp_input_scattered": True}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tensor_parallel_size": 3}),
        ("gemma2", {"enable_two_batch_overlap": True}),
        ("qwen3_moe", {"expert_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("deepseek_v3", {"tensor_parallel_size": 4}),
        ("deepseek_v3", {"speculative_algorithm": "NGRAM"}),
        ("deepseek_v32", {}),
        ("deepseek_v3", {"tensor_parallel_size": 4, "enable_dp_attention": True, "data_parallel_size": 2}),
        ("qwen3_moe", {"tensor_parallel_size": 4, "attention_context_parallel_size": 2}),
        ("jamba", {}),
        ("qwen3_next", {"attention_context_parallel_size": 2}),
    ],
    ids=str,
)
async def test_answers_are_those_of_transformers(
    family: str, options: dict[str, Any], checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    """In chunks, and with what the first round left in the prefix cache."""
    expected = [reference(family, prompt, COUNT) for prompt in PROMPTS]
    async with Engine(model_path=str(checkpoint(family)), **(SCATTERED | options)) as engine:
        for _ in range(2):
            assert await greedy_at_once(engine, PROMPTS, COUNT) == expected


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("llama", {"tensor_parallel_size": 1}, "does nothing with one rank"),
        ("qwen3_moe", {"moe_a2a_backend": "deepep"}, "which gives each rank a shard by itself"),
        (
            "llama",
            {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ("all",)},
            "whose adapters are given all tokens",
        ),
        ("gpt_oss", {}, "not GptOss"),
    ],
)
async def test_what_has_no_shards_is_refused(
    family: str, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionsError, match=why):
        async with Engine(model_path=str(make_checkpoint(family, tmp_path)), **(SCATTERED | options)):
            pass

"""Adapters on simulated NPUs: the plain products, in steps beside the plain model's, are those of models with
merged weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import Engine
from tests.e2e.conftest import checkpoint
from tests.e2e.test_adapters import PROMPTS, Expect, made, named, run_all
from tests.models.make import make_checkpoint
from tests.ranks.lora_slots import decode_with_adapters

__all__ = ["checkpoint", "made"]  # fixtures
pytestmark = [pytest.mark.ascend, pytest.mark.lenient, pytest.mark.usefixtures("forked_children")]

OPTIONS: dict[str, Any] = {
    "device": "npu",
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 2048,
    "chunked_prefill_size": 256,
    "max_running_requests": 16,
}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "options"), [("qwen3", {"max_loras_per_batch": 2}), ("qwen3_moe", {"tensor_parallel_size": 2})]
)
async def test_as_merged(
    family: str,
    options: dict[str, Any],
    made: Callable[[str], tuple[dict[str, str], Expect]],
    checkpoint: Callable[[str], Path],
) -> None:
    paths, expect = made(family)
    asks = [(name, prompt) for prompt in PROMPTS for name in ("", *paths)]
    async with Engine(
        model_path=str(checkpoint(family)), lora_paths=named(paths), **(OPTIONS | options)
    ) as engine:
        expected = [expect(name, prompt) for name, prompt in asks]
        assert await run_all(engine, asks) == expected
        assert await run_all(engine, asks[::-1]) == expected[::-1], (
            "with what the first round left in the prefix cache"
        )


def test_captured_steps(tmp_path: Path) -> None:
    """Who sits where is read on the device."""
    folder = make_checkpoint("llama", tmp_path / "base", num_hidden_layers=1)
    decode_with_adapters(folder, tmp_path, 2, page_size=128, device="npu", dtype="float32", graph_sizes=[4])

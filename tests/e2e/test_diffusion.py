"""Diffusion models answer as transformers' modules do by a mask, token for token: alone, in company, with what
is in the prefix cache, when sequences give way and when ranks die."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from runtime import Engine
from tests.e2e.greedy import greedy, greedy_at_once
from tests.models.make_diffusion import SIZES, BlockReference, make_diffusion

pytestmark = pytest.mark.anyio

COUNT = 21
SHARED = list(range(10, 58))
PROMPTS = [SHARED + [60, 61], SHARED + [70], list(range(100, 104)), SHARED[:19] + [7, 8, 9], [5]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 2048,
    "dllm_algorithm": "LowConfidence",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "page size of a block, chunks of two": {"page_size": 8, "chunked_prefill_size": 17},
    "no prefix cache": {"disable_radix_cache": True},
    "few pages: sequences give way": {"page_size": 8, "max_total_tokens": 96},
}

Diffusion = Callable[[str], tuple[Path, BlockReference]]


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> Diffusion:
    """kind -> a checkpoint and its reference"""

    @cache
    def make(kind: str) -> tuple[Path, BlockReference]:
        folder = make_diffusion(kind, tmp_path_factory.mktemp(kind))
        return folder, BlockReference(folder, SIZES[kind])

    return make


def settings_file(folder: Path, **settings: object) -> str:
    path = folder / "algorithm.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    return str(path)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("threshold", [0.95, 0.2])
async def test_low_confidence(kind: str, threshold: float, diffusion: Diffusion, tmp_path: Path) -> None:
    folder, reference = diffusion(kind)
    config = settings_file(tmp_path, threshold=threshold)
    expected = [reference.low_confidence(prompt, COUNT, threshold) for prompt in PROMPTS]
    async with Engine(model_path=str(folder), dllm_algorithm_config=config, **OPTIONS) as engine:
        assert [await greedy(engine, prompt, COUNT) for prompt in PROMPTS] == expected, "alone"
        assert await greedy_at_once(engine, PROMPTS, COUNT) == expected, "in company, out of the cache"

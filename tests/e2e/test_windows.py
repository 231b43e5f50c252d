"""Models that mix full layers and layers with a sliding window, or have the latter only: greedy output equals
transformers."""

from pathlib import Path
from typing import Any

import pytest

from runtime import Engine
from runtime.errors import OptionsError
from tests.e2e.test_exact import COUNT, run_all
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

pytestmark = pytest.mark.anyio

SHARED = [(i * 37) % 250 for i in range(90)]
PROMPTS = [
    [*SHARED, 60, 61],
    [*SHARED, 70],
    list(range(100, 105)),
    [*SHARED[:40], 7, 8, 9],
    [5],
    list(range(30, 100)),
]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}),
    "all": ("mistral", {}),
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "max_running_requests": 8,
    "page_size": 4,
    "chunked_prefill_size": 16,
    "max_total_tokens": 2048,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "few window pages": {"swa_full_tokens_ratio": 0.01, "chunked_prefill_size": 7, "max_running_requests": 4},
    "few pages of both": {
        "swa_full_tokens_ratio": 0.2,
        "max_total_tokens": 160,
        "schedule_conservativeness": 0.0,
    },
    "one pool": {"disable_hybrid_swa_memory": True},
    "no prefix cache, one step in flight": {
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "page_size": 1,
    },
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = MODELS[request.param]
    return make_checkpoint(family, tmp_path_factory.mktemp("model"), sliding_window=13, **overrides)


@pytest.mark.parametrize("setting", SETTINGS)
async def test_tokens(setting: str, folder: Path) -> None:
    reference = Reference(folder)
    expected = [reference.greedy(prompt, COUNT) for prompt in PROMPTS]
    async with Engine(model_path=str(folder), **(OPTIONS | SETTINGS[setting])) as engine:
        assert await run_all(engine, PROMPTS) == expected
        assert await run_all(engine, PROMPTS) == expected, (
            "with what the first round left in the prefix cache"
        )
        assert await run_all(engine, PROMPTS[:1]) == expected[:1]
        load = engine.load()
        assert load.used_pages == load.cached_pages and load.used_window_pages == load.cached_window_pages
        assert (load.total_window_pages == 0) == (setting == "one pool")
        assert (b"runtime_cached_tokens_total 0\n" in engine.metrics()) == ("no prefix" in setting)


async def test_two_ranks(folder: Path) -> None:
    reference = Reference(folder)
    async with Engine(model_path=str(folder), tensor_parallel_size=2, **OPTIONS) as engine:
        assert await run_all(engine, PROMPTS) == [reference.greedy(prompt, COUNT) for prompt in PROMPTS]


async def test_the_host_tier_is_refused(folder: Path) -> None:
    with pytest.raises(OptionsError, match="--disable-hybrid-swa-memory"):
        Engine(model_path=str(folder), enable_hierarchical_cache=True, **OPTIONS)

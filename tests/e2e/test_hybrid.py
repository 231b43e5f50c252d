"""Models with recurrent layers through the library: the scheduler's states on real ranks, whatever the
schedule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import Engine
from tests.e2e.conftest import Generate
from tests.e2e.test_exact import COUNT, OPTIONS, PROMPTS, run_all

pytestmark = pytest.mark.anyio

SETTINGS: dict[str, dict[str, Any]] = {
    "page size 4, chunk 7, states at every page": {
        "page_size": 4,
        "chunked_prefill_size": 7,
        "mamba_track_interval": 4,
        "mamba_scheduler_strategy": "extra_buffer",
    },
    "no states while decoding": {"page_size": 4, "mamba_scheduler_strategy": "no_buffer"},
    "few pages: sequences give way": {"page_size": 4, "max_total_tokens": 100, "mamba_track_interval": 8},
    "two states": {"page_size": 4, "max_mamba_cache_size": 2, "mamba_track_interval": 4},
    "no prefix cache": {"disable_radix_cache": True, "chunked_prefill_size": 16},
}


@pytest.mark.parametrize(("setting", "family"), [(setting, "mamba2") for setting in SETTINGS])
async def test_settings(
    setting: str, family: str, checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    expected = [reference(family, prompt, COUNT) for prompt in PROMPTS]
    options = OPTIONS | SETTINGS[setting]
    async with Engine(model_path=str(checkpoint(family)), **options) as engine:
        assert await run_all(engine, PROMPTS) == expected
        assert await run_all(engine, PROMPTS) == expected, (
            "with what the first round left in the prefix cache"
        )
        load = engine.load()
        assert load.running == load.waiting == 0 and load.used_pages == load.cached_pages
        if "give way" in setting:
            assert b"runtime_preemptions_total 0\n" not in engine.metrics()
        elif "prefix" not in setting:
            assert b"runtime_cached_tokens_total 0\n" not in engine.metrics()


async def test_two_ranks(checkpoint: Callable[[str], Path], reference: Generate) -> None:
    async with Engine(
        model_path=str(checkpoint("mamba2")), tensor_parallel_size=2, page_size=4, **OPTIONS
    ) as engine:
        for _ in range(2):
            assert await run_all(engine, PROMPTS) == [
                reference("mamba2", prompt, COUNT) for prompt in PROMPTS
            ]

"""Models with recurrent layers through the library: the scheduler's states on real ranks, whatever the
schedule."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runtime import Engine
from runtime.cache.sequence import Sequence
from runtime.scheduling.drafts import Draft, Drafter
from tests.e2e.conftest import Generate
from tests.e2e.test_exact import COUNT, OPTIONS, PROMPTS, run_all
from tests.models.make import VOCAB_SIZE

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


@pytest.mark.parametrize(
    ("setting", "family"),
    [
        *((setting, "mamba2") for setting in SETTINGS),
        ("few pages: sequences give way", "jamba"),
        ("page size 4, chunk 7, states at every page", "kimi_linear"),
    ],
)
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


class Answers(Drafter):
    """Drafts of answers that are known: right, wrong in places, or from their first token on."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = dict(zip(map(tuple, PROMPTS), answers, strict=True))
        self.luck = 1.0
        self.random = Random(3)
        self.proposed = 0

    def propose(self, sequence: Sequence, first: int, last: int, most: int) -> Draft | None:
        answer = self.answers[tuple(sequence.tokens[: sequence.prompt_len])]
        at = self.random.randint(first, last) + 1 - sequence.prompt_len
        truth = answer[at : at + min(most, self.random.randint(1, 5))]
        self.proposed += len(truth)
        tokens = [token if self.random.random() < self.luck else (token + 1) % VOCAB_SIZE for token in truth]
        return Draft(tokens) if tokens else None


@pytest.mark.parametrize("setting", SETTINGS)
async def test_drafts(setting: str, checkpoint: Callable[[str], Path], reference: Generate) -> None:
    """Tokens are those without drafts, whatever is accepted."""
    expected = [reference("mamba2", prompt, COUNT) for prompt in PROMPTS]
    drafter = Answers(expected)
    async with Engine(model_path=str(checkpoint("mamba2")), **OPTIONS | SETTINGS[setting]) as engine:
        scheduler, steps = engine._core.replicas[0].scheduler, list[int]()
        for drafter.luck in (0.6, 0.0, 1.0):
            scheduler.planner.drafts.drafter = drafter
            before, proposed = scheduler.totals.steps, drafter.proposed
            assert await run_all(engine, PROMPTS) == expected
            steps.append(scheduler.totals.steps - before)
            assert drafter.proposed > proposed
        assert steps[2] < steps[1], "what is right saves steps"
        load = engine.load()
        assert load.running == load.waiting == 0 and load.used_pages == load.cached_pages


@pytest.mark.parametrize(
    "family",
    [
        "jamba",
        "kimi_linear",
        *(
            pytest.param(family, marks=pytest.mark.full)
            for family in ("mamba2", "nemotron_h", "falcon_h1", "qwen3_5", "olmo_hybrid", "granite_hybrid")
        ),
    ],
)
async def test_two_ranks(family: str, checkpoint: Callable[[str], Path], reference: Generate) -> None:
    """Mixers are split by heads or channels, experts by their inner size."""
    folder = checkpoint(family)
    async with Engine(model_path=str(folder), tensor_parallel_size=2, page_size=4, **OPTIONS) as engine:
        for _ in range(2):
            assert await run_all(engine, PROMPTS) == [reference(family, prompt, COUNT) for prompt in PROMPTS]

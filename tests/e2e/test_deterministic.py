"""A request has the same bits alone and in company, however its prompt is cut and whatever of it was cached
(--enable-deterministic-inference)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.devices.cpu.kernels import choice
from runtime.errors import OptionsError

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not choice.usable_levels(), reason="this machine has no build of the kernels"),
]

SHARED = [3 + i % 240 for i in range(150)]
PROMPTS = [SHARED[:5], SHARED[:40], [9, *SHARED], SHARED, SHARED[:133], SHARED[30:70]]
Answer = tuple[list[int], list[float]]


async def answers(folder: Path, *, at_once: bool, **options: Any) -> list[Answer]:
    """Random tokens behind each prompt, and their log probabilities."""
    found: list[Answer] = [([], [])] * len(PROMPTS)
    async with Engine(
        model_path=str(folder), context_length=256, enable_deterministic_inference=True, **options
    ) as engine:

        async def ask(place: int) -> None:
            answer = await engine.generate(
                PROMPTS[place], temperature=0.9, seed=place, ignore_eos=True, max_new_tokens=9, logprobs=True
            )
            found[place] = answer.token_ids, [token.logprob for token in answer.logprobs]

        if at_once:
            async with anyio.create_task_group() as tasks:
                for place in range(len(PROMPTS)):
                    tasks.start_soon(ask, place)
        else:
            for place in range(len(PROMPTS)):
                await ask(place)
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("qwen3_moe", {"dtype": "bfloat16", "quantization": "int8"}),
        ("gpt_oss", {"dtype": "float32"}),
        ("deepseek_v2", {"dtype": "bfloat16"}),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
async def test_bits_are_those_of_the_request_alone(
    checkpoint: Callable[[str], Path], family: str, options: dict[str, Any]
) -> None:
    alone = await answers(checkpoint(family), at_once=False, disable_radix_cache=True, **options)
    tight = {"chunked_prefill_size": 48, "max_total_tokens": 320}  # some are computed again
    assert await answers(checkpoint(family), at_once=True, **tight, **options) == alone


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("falcon_h1", {}, "bits of recurrent layers depend"),
        ("llama", {"model_impl": "transformers"}, "operators of torch"),
    ],
)
async def test_where_bits_depend_on_others_it_is_refused(
    checkpoint: Callable[[str], Path], family: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionsError, match=message):
        await answers(checkpoint(family), at_once=False, **options)

"""Context parallelism over gloo: ranks that share prompts in attention give the answers of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import Engine
from runtime.errors import OptionsError
from runtime.options.facts import this_machine
from runtime.options.footprint import footprint, stored_weights
from tests.e2e.conftest import Generate
from tests.e2e.greedy import greedy_at_once

pytestmark = pytest.mark.anyio

COUNT = 12
# one is longer than a tile of attention, one shorter than there are ranks
PROMPTS = [[i * 7 % 250 for i in range(300)], [3], list(range(40, 70)), [7] * 9, [1, 2, 3] * 14]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 320,
    "page_size": 4,
    "random_seed": 1,
    "max_running_requests": 6,
    "standby_ranks": 0,
    "chunked_prefill_size": 37,
}
SPARSE = {"enable_nsa_prefill_context_parallel": True, "nsa_prefill_cp_mode": "in-seq-split"}


@pytest.mark.parametrize(
    ("family", "ranks", "options"),
    [
        ("llama", 2, {}),
        ("llama", 4, {"chunked_prefill_size": 512}),
        ("qwen3", 4, {"speculative_algorithm": "NGRAM"}),
        ("qwen3_moe", 2, {"disable_overlap_schedule": True}),
        ("qwen3_moe", 4, {"ep_size": 2}),
        ("gpt_oss", 2, {}),
        ("deepseek_v3", 2, {}),
        ("deepseek_v3", 4, {}),
        ("deepseek_v32", 2, SPARSE),
        ("deepseek_v32", 4, SPARSE),
        ("deepseek_v32", 2, SPARSE | {"nsa_prefill_cp_mode": "round-robin-split"}),
        ("deepseek_v32", 4, {"enable_nsa_prefill_context_parallel": True}),
        ("llama", 2, {"pipeline_parallel_size": 2}),
        ("llama", 4, {"attention_context_parallel_size": 4}),
        ("jamba", 2, {}),
        ("qwen3_next", 2, {"chunked_prefill_size": 512}),
        ("qwen3_moe", 4, {"moe_a2a_backend": "deepep", "deepep_mode": "normal"}),
        ("deepseek_v3", 2, {"moe_a2a_backend": "deepep"}),
        ("deepseek_v3", 4, {"enable_attn_tp_input_scattered": True}),
        ("llama", 4, {"enable_dp_attention": True, "data_parallel_size": 2}),
        ("deepseek_v3", 4, {"enable_two_batch_overlap": True}),
        ("deepseek_v3", 4, {"enable_dp_attention": True, "data_parallel_size": 2}),
    ],
    ids=str,
)
async def test_answers_are_those_of_transformers(
    family: str, ranks: int, options: dict[str, Any], checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    expected = [reference(family, prompt, COUNT) for prompt in PROMPTS]
    more = [*PROMPTS[0][:200], 9, 8, 7, 6, 5]  # two thirds of it are cached
    parallel = {"tensor_parallel_size": ranks, "attention_context_parallel_size": 2}
    async with Engine(model_path=str(checkpoint(family)), **(OPTIONS | parallel | options)) as engine:
        assert await greedy_at_once(engine, PROMPTS, COUNT) == expected
        answer = await engine.generate(more, temperature=0, ignore_eos=True, max_new_tokens=COUNT)
        assert answer.token_ids == reference(family, more, COUNT)
        core = engine._core
        # recurrent states are kept where a chunk ends, at multiples of what a kernel computes at once
        kept = 196 if core.model.recurrent is None else 0 if "chunked_prefill_size" in options else 128
        assert answer.finish is not None and answer.finish.cached_tokens >= kept
        found = footprint(core.plan, core.model, this_machine(), stored_weights(checkpoint(family)))
        readies = core.replicas[0].supervisor.readies
        assert found.weights_bytes in {ready.weights_bytes for ready in readies}  # of one stage of several
        if (
            not any(core.model.windows) and core.model.recurrent is None
        ):  # windows and states are counted apart
            assert {ready.pages_bytes // ready.num_pages for ready in readies} == {4 * found.token_bytes}


async def test_what_does_not_share_prompts_is_refused(checkpoint: Callable[[str], Path]) -> None:
    shared = {"tensor_parallel_size": 2, "attention_context_parallel_size": 2}
    for family, options, why in (
        ("llama", {"attention_context_parallel_size": 2}, "does not divide --tensor-parallel-size 1"),
        ("llama", shared | SPARSE, "this one has none; leave it out"),
        ("deepseek_v32", shared, "add it"),
        ("deepseek_v32", {"enable_nsa_prefill_context_parallel": True}, "does nothing without"),
        (
            "llama",
            shared | {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ("all",)},
            "adap",
        ),
        ("deepseek_v3", shared | {"speculative_algorithm": "NEXTN"}, "draft model .* take NGRAM"),
        ("gemma3n", shared, "projections of their own"),
    ):
        with pytest.raises(OptionsError, match=why):
            async with Engine(model_path=str(checkpoint(family)), **(OPTIONS | options)):
                pass

"""Data-parallel attention of models whose layers are not those of plain decoders, over gloo: tokens are those
of transformers in float32, in company, and of one group while the other has nothing to do."""

from pathlib import Path
from typing import Any

import pytest

from runtime import Engine
from runtime.options.facts import this_machine
from runtime.options.footprint import footprint, stored_weights
from tests.e2e.greedy import greedy, greedy_at_once
from tests.e2e.test_attention_groups import COUNT, OPTIONS, PROMPTS
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt_oss", {"tensor_parallel_size": 4}),
        ("jamba", {"chunked_prefill_size": 7}),
        ("falcon_h1", {"tensor_parallel_size": 4}),
        ("qwen3_5_moe", {"moe_a2a_backend": "deepep", "enable_two_batch_overlap": True}),
        ("kimi_linear", {"tensor_parallel_size": 4, "moe_dense_tp_size": 1}),
        ("nemotron_h", {}),
        ("zamba2", {"tensor_parallel_size": 4}),
        ("olmo_hybrid", {"enable_dp_lm_head": True}),
        ("gemma3n", {"tensor_parallel_size": 4}),
        ("gemma4", {}),
        ("longcat", {"tensor_parallel_size": 4}),
        ("afmoe", {}),
        ("bloom", {}),
    ],
    ids=str,
)
async def test_answers_are_those_of_transformers(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path)
    reference = Reference(folder)
    expected = [reference.greedy(prompt, COUNT) for prompt in PROMPTS]
    async with Engine(model_path=str(folder), **(OPTIONS | options)) as engine:
        assert await greedy_at_once(engine, PROMPTS, COUNT) == expected
        for i in (0, 1):
            assert await greedy(engine, PROMPTS[i], COUNT) == expected[i]
        core = engine._core
        assert [replica.num_steps > 0 for replica in core.replicas] == [True, True]
        found = footprint(core.plan, core.model, this_machine(), stored_weights(folder))
        readies = core.replicas[0].supervisor.readies
        assert max(ready.weights_bytes for ready in readies) == found.weights_bytes
        assert {ready.num_state_slots for ready in readies} == {found.num_states}

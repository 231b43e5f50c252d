"""How DeepSeek V3, V3.2 and Qwen3 are deployed on Atlas A3, with small models of the same structure:
attention groups, shared prompts, exchanged experts, drafts and host memory. Tokens are transformers'."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from tests.ascend.test_serve import OPTIONS
from tests.e2e.test_exact import COUNT, run_all
from tests.metrics.read import sample
from tests.models.make import make_checkpoint
from tests.models.make_heads import make_eagle3
from tests.models.make_next_token import add_next_token_layers
from tests.models.reference import Reference

pytestmark = [pytest.mark.ascend, pytest.mark.anyio, pytest.mark.usefixtures("forked_children")]

SHARED = [i * 37 % 250 for i in range(200)]
PROMPTS = [[*SHARED, 60, 61], [*SHARED[:140], 7, 8, 9], list(range(100, 105)), [5]]
LATENT: dict[str, Any] = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "num_hidden_layers": 2}
SPARSE = LATENT | {"index_head_dim": 32}
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "max_running_requests": 4, "standby_ranks": 0}
GROUPS = TWO | {"data_parallel_size": 2, "enable_dp_attention": True, "enable_dp_lm_head": True}
EXCHANGE = {"moe_a2a_backend": "deepep", "deepep_mode": "low_latency"}
PARTS = TWO | {"attention_context_parallel_size": 2, "enable_nsa_prefill_context_parallel": True}
GRAPHS = {"speculative_num_steps": 2, "cuda_graph_bs": (2, 4)}
NEXTN = GRAPHS | {"speculative_algorithm": "NEXTN"}
DEPLOYMENTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "V3.2, groups, exchange": ("deepseek_v32", SPARSE, GROUPS | EXCHANGE),
    "V3.2, prompts in halves": ("deepseek_v32", SPARSE, PARTS | {"nsa_prefill_cp_mode": "in-seq-split"}),
    "V3.2, prompts in turns": ("deepseek_v32", SPARSE, PARTS | {"chunked_prefill_size": 50}),
    "V3.2, next-token layer, host memory": (
        "deepseek_v32",
        SPARSE,
        NEXTN | {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "max_total_tokens": 640},
    ),
    "V3, groups, exchange": ("deepseek_v3", LATENT, GROUPS | EXCHANGE),
    "V3, next-token layer, exchange": ("deepseek_v3", LATENT, TWO | EXCHANGE | NEXTN),
    "Qwen3 MoE, groups, exchange": ("qwen3_moe", {"num_hidden_layers": 2}, GROUPS | EXCHANGE),
    "Qwen3, EAGLE 3": ("qwen3", {"num_hidden_layers": 6}, TWO | GRAPHS | {"speculative_algorithm": "EAGLE3"}),
}


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
async def test_tokens_are_those_of_transformers(deployment: str, tmp_path: Path) -> None:
    family, overrides, options = DEPLOYMENTS[deployment]
    folder = make_checkpoint(family, tmp_path / "model", **overrides)
    reference = Reference(folder)
    expected = [reference.greedy(prompt, COUNT) for prompt in PROMPTS]
    drafts = options.get("speculative_algorithm")
    if drafts == "NEXTN":
        add_next_token_layers(folder)
    if drafts == "EAGLE3":
        options = options | {"speculative_draft_model_path": str(make_eagle3(tmp_path / "head"))}
    async with Engine(model_path=str(folder), **(OPTIONS | options)) as engine:
        with anyio.fail_after(120):
            while drafts and sample(engine.metrics(), "runtime_captured_sizes") < 2:
                await anyio.sleep(0.05)
        for _ in range(2):
            assert await run_all(engine, PROMPTS) == expected
        assert sample(engine.metrics(), "runtime_capture_failures_total") == 0

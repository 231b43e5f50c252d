"""How DeepSeek V3, V3.2 and Qwen3 are deployed on Atlas A3: the published profiles, and more of what they
combine, with small models of the same structure on fewer ranks. Tokens are transformers'."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.options.profile import Profile, names, read_profile
from tests.ascend.test_serve import OPTIONS
from tests.e2e.test_exact import COUNT, run_all
from tests.metrics.read import sample
from tests.models.make import make_checkpoint
from tests.models.make_heads import make_eagle3
from tests.models.make_next_token import add_next_token_layers
from tests.models.reference import Reference

pytestmark = [
    pytest.mark.ascend,
    pytest.mark.lenient,
    pytest.mark.anyio,
    pytest.mark.usefixtures("forked_children"),
]

SHARED = [i * 37 % 250 for i in range(200)]
PROMPTS = [[*SHARED, 60, 61], [*SHARED[:140], 7, 8, 9], list(range(100, 105)), [5]]
LATENT: dict[str, Any] = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "num_hidden_layers": 2}
SPARSE = LATENT | {"index_head_dim": 32}
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "max_running_requests": 4, "standby_ranks": 0}
PARTS = TWO | {"attention_context_parallel_size": 2, "enable_nsa_prefill_context_parallel": True}
GRAPHS = {"cuda_graph_bs": (2, 4)}
NEXTN = GRAPHS | {"speculative_num_steps": 2, "speculative_algorithm": "NEXTN"}
DEPLOYMENTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "V3.2, prompts in turns": ("deepseek_v32", SPARSE, PARTS | {"chunked_prefill_size": 50}),
    "V3.2, next-token layer, host memory": (
        "deepseek_v32",
        SPARSE,
        NEXTN | {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "max_total_tokens": 640},
    ),
    "V3.2, index keys in 8 bits, all tokens chosen, next-token layer, host memory": (
        "deepseek_v32",
        SPARSE | {"index_topk": 512},
        NEXTN
        | {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2.0,
            "max_total_tokens": 640,
            "npu_int8_index": True,
        },
    ),
    "V3, an EAGLE-3 head of Llama's kind": (
        "deepseek_v3",
        LATENT | {"num_hidden_layers": 4},
        GRAPHS | {"speculative_num_steps": 2, "speculative_algorithm": "EAGLE3", "max_running_requests": 4},
    ),
    "gpt-oss, sinks in graphs": ("gpt_oss", {"head_dim": 128}, GRAPHS | {"max_running_requests": 4}),
    "Qwen3, pages in NZ, host memory in batches": (
        "qwen3",
        {"head_dim": 128},
        GRAPHS
        | {
            "npu_nz_cache": True,
            "max_running_requests": 4,
            "enable_hierarchical_cache": True,
            "hicache_io_backend": "kernel_ascend",
            "hicache_ratio": 2.0,
            "max_total_tokens": 640,
        },
    ),
    "Qwen3-Next": ("qwen3_next", {}, GRAPHS | {"max_running_requests": 4}),
    "V3, groups of two ranks, a head of all": (
        "deepseek_v3",
        LATENT | {"num_attention_heads": 4},
        TWO | GRAPHS | {"tensor_parallel_size": 4, "data_parallel_size": 2, "enable_dp_attention": True},
    ),
}
# profile -> family and sizes of a model of the structure that it is for
PROFILES: dict[str, tuple[str, dict[str, Any]]] = {
    "ascend-a3-deepseek-r1": ("deepseek_v3", LATENT),
    "ascend-a3-deepseek-r1-decode": ("deepseek_v3", LATENT),
    "ascend-a3-deepseek-r1-prefill": ("deepseek_v3", LATENT),
    "ascend-a3-deepseek-v3.2-decode": ("deepseek_v32", SPARSE),
    "ascend-a3-deepseek-v3.2-prefill": ("deepseek_v32", SPARSE),
    "ascend-a3-qwen3-235b": ("qwen3_moe", {"num_hidden_layers": 4}),
    "ascend-a3-qwen3-32b-latency": ("qwen3", {"num_hidden_layers": 4}),
}
# like another one but for sizes that a small model has not
LIKE_OTHERS = {
    "ascend-a2-qwen3-32b": "ascend-a3-qwen3-32b-latency",
    "ascend-a3-qwen3-32b": "ascend-a3-qwen3-32b-latency",
    "ascend-a3-qwen3-30b-a3b": "ascend-a3-qwen3-32b-latency",
    "ascend-a3-qwen3-235b-latency": "ascend-a3-qwen3-32b-latency",
}
# of models that take images: test_media.py
WITH_MEDIA = {"ascend-a3-qwen3-vl-8b"}
SIZES = ("tensor", "expert", "data", "attention_context")


def scaled(profile: Profile) -> dict[str, Any]:
    """What a small model on two simulated NPUs has otherwise: sizes, and what the simulator lacks."""
    changes: dict[str, Any] = {f"{name}_parallel_size": 2 for name in SIZES}
    changes |= {
        "dtype": "float32",
        "quantization": None,
        "max_running_requests": 4,
        "max_prefill_tokens": 512,
    }
    changes |= {"npu_task_queue": 0, "npu_alloc_conf": "expandable_segments:False", "context_length": 512}
    changes = {name: value for name, value in changes.items() if name in profile.options}
    own = {name: value for name, value in OPTIONS.items() if name not in profile.options}
    graphs = {} if "disable_cuda_graph" in profile.options else GRAPHS
    return own | {"standby_ranks": 0, "max_total_tokens": 2048} | graphs | changes


def test_every_profile_is_tried() -> None:
    tried = PROFILES.keys() | LIKE_OTHERS.keys() | WITH_MEDIA
    assert {name for name in names() if name.startswith("ascend")} == tried
    assert set(LIKE_OTHERS.values()) <= PROFILES.keys()


# a half of test_split_servers.py, which starts it too
HALF = "ascend-a3-deepseek-r1-prefill"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name == HALF else []) for name in PROFILES]
)
async def test_profiles(name: str, tmp_path: Path) -> None:
    """With drafts, groups and graphs as the profile has them."""
    family, sizes = PROFILES[name]
    profile, folder = read_profile(name), make_checkpoint(family, tmp_path / "model", **sizes)
    reference = Reference(folder)
    expected = [reference.greedy(prompt, COUNT) for prompt in PROMPTS]
    options = scaled(profile)
    if "speculative_algorithm" in profile.options:
        add_next_token_layers(folder)
    if "speculative_draft_model_path" in profile.when_given:
        options["speculative_draft_model_path"] = str(make_eagle3(tmp_path / "head"))
    await check(folder, options | {"profile": name}, expected)


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
async def test_tokens_are_those_of_transformers(deployment: str, tmp_path: Path) -> None:
    family, overrides, options = DEPLOYMENTS[deployment]
    folder = make_checkpoint(family, tmp_path / "model", **overrides)
    reference = Reference(folder)
    expected = [reference.greedy(prompt, COUNT) for prompt in PROMPTS]
    if options.get("speculative_algorithm") == "NEXTN":
        add_next_token_layers(folder)
    if options.get("speculative_algorithm") == "EAGLE3":
        options = options | {"speculative_draft_model_path": str(make_eagle3(tmp_path / "head"))}
    await check(folder, OPTIONS | options, expected)


async def check(folder: Path, options: dict[str, Any], expected: list[list[int]]) -> None:
    """Answers, twice, once all graphs are captured."""
    async with Engine(model_path=str(folder), **options) as engine:
        kinds = ["runtime_captured_sizes"] if "cuda_graph_bs" in options else []
        if kinds and engine._core.plan.speculation.in_force is not None:
            kinds.append("runtime_captured_verify_sizes")
        with anyio.fail_after(120):
            while any(sample(engine.metrics(), kind) < 2 for kind in kinds):
                await anyio.sleep(0.05)
        for _ in range(2):
            assert await run_all(engine, PROMPTS) == expected
        assert sample(engine.metrics(), "runtime_capture_failures_total") == 0

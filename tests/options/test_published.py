"""The memory plan of published models, from the sizes in their config.json: as many weights as their makers
count."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.models.config.model_config import read_config
from runtime.options.model_sizes import cached_count, float_bytes, weight_count

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
}
# hidden, intermediate and expert sizes, layers, heads; the rest; weights; numbers that a layer keeps of a
# token
MODELS: dict[str, tuple[tuple[int, ...], dict[str, Any], int, int]] = {
    "DeepSeek-V3": (
        (7168, 18432, 2048, 61, 128),
        V2
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "vocab_size": 129280,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "q_lora_rank": 1536,
            "first_k_dense_replace": 3,
        },
        671_026_419_200,
        576,
    ),
    "DeepSeek-V2": (
        (5120, 12288, 1536, 60, 128),
        V2
        | {
            "n_routed_experts": 160,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "q_lora_rank": 1536,
        },
        235_741_434_880,
        576,
    ),
    "DeepSeek-V2-Lite": (
        (2048, 10944, 1408, 27, 16),
        V2 | {"n_routed_experts": 64, "n_group": 1, "topk_group": 1},
        15_706_484_224,
        576,
    ),
    "Qwen3-30B-A3B": ((2048, 6144, 768, 48, 32), QWEN3, 30_532_122_624, 1024),
    "Qwen3-235B-A22B": ((4096, 12288, 1536, 94, 64), QWEN3, 235_093_634_560, 1024),
    "Qwen1.5-MoE-A2.7B": (
        (2048, 5632, 1408, 24, 16),
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "vocab_size": 151936,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 5632,
        },
        14_315_784_192,
        4096,
    ),
}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_as_many_as_published(name: str, tmp_path: Path) -> None:
    sizes, rest, num_weights, kept = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(dict(zip(SIZES, sizes, strict=True)) | rest))
    config = read_config(tmp_path)
    assert weight_count(config, 1) + float_bytes(config) // 4 == num_weights
    assert cached_count(config, 1) == kept
    spread = weight_count(config, 4, 4)
    assert spread == weight_count(config, 4, 1) == weight_count(config, 4, 2), (
        "whole experts or slices: the same bytes"
    )
    assert num_weights / 4 < spread < num_weights / 3.5

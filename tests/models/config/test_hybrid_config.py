"""config.json of families with recurrent layers, as their checkpoints write it, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ModelError
from runtime.models.config.model_config import ModelConfig, read_config
from runtime.models.config.recurrent_config import GatedDelta, Mamba1, Mamba2

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NEMOTRON = BASE | {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M-*EM",
    "num_hidden_layers": 5,
    "attention_head_dim": 32,
    "mamba_num_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
}
KIMI = BASE | {
    "architectures": ["KimiLinearForCausalLM"],
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "model_max_length": 4096,
    "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 16, "num_heads": 4},
}
FALCON = BASE | {"architectures": ["FalconH1ForCausalLM"], "mamba_n_heads": 8, "mamba_d_ssm": 128}
GRANITE = BASE | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "mamba_n_heads": 8,
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "layer_types": ["mamba", "attention", "mamba"],
}
QWEN = BASE | {"architectures": ["Qwen3_5ForCausalLM"]}


def read(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return read_config(folder)


def test_layers_by_letters(tmp_path: Path) -> None:
    config = read(tmp_path, NEMOTRON)
    assert config.recurrent is not None and config.moe is not None
    assert config.recurrent.kinds == ("recurrent", "none", "attention", "none", "recurrent")
    assert config.moe.layers == (False, False, False, True, False)
    assert (config.moe.shared_size, config.moe.is_gated, config.head_dim) == (20, False, 32)
    assert {rope.rope_type for rope in config.layer_ropes} == {"none"}


def test_layers_counted_from_one(tmp_path: Path) -> None:
    config = read(tmp_path, KIMI)
    assert config.recurrent is not None and config.moe is not None
    assert config.recurrent.kinds == ("recurrent", "recurrent", "attention")
    assert config.moe.layers == (False, True, True)
    assert (config.moe.routing.top_k, config.moe.shared_size, config.context_len) == (2, 12, 4096)


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    """Python writes infinity by name."""
    config = read(tmp_path, FALCON | {"time_step_limit": [0.1, math.inf], "head_dim": 16})
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert config.recurrent is not None and isinstance(config.recurrent.mixer, Mamba2)
    assert config.recurrent.mixer.step_limits == (0.1, math.inf)
    assert config.recurrent.mixer.norm == "none"


def test_without_experts_the_shared_one_is_the_feed_forward(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE)
    assert (config.moe, config.intermediate_size) == (None, 80)
    assert {rope.rope_type for rope in config.layer_ropes} == {"none"}
    assert read(tmp_path, GRANITE | {"position_embedding_type": "rope"}).layer_ropes == ()


def test_sizes_that_follow_from_others(tmp_path: Path) -> None:
    mamba = read(tmp_path, BASE | {"architectures": ["MambaForCausalLM"], "intermediate_size": None})
    assert mamba.recurrent is not None and isinstance(mamba.recurrent.mixer, Mamba1)
    assert (mamba.recurrent.mixer.inner, mamba.recurrent.mixer.step_rank) == (128, 4)
    olmo = read(tmp_path, BASE | {"architectures": ["OlmoHybridForCausalLM"]})
    assert olmo.recurrent is not None and isinstance(olmo.recurrent.mixer, GatedDelta)
    assert (olmo.recurrent.mixer.key_dim, olmo.recurrent.mixer.value_dim) == (12, 24)
    assert olmo.recurrent.kinds == ("recurrent", "recurrent", "attention")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (NEMOTRON | {"hybrid_override_pattern": "M?"}, ["hybrid_override_pattern", "?"]),
        (NEMOTRON | {"hybrid_override_pattern": None}, ["layers_block_type", "hybrid_override_pattern"]),
        (NEMOTRON | {"layers_block_type": ["mamba", 3]}, ["layers_block_type"]),
        (NEMOTRON | {"mlp_bias": True}, ["mlp_bias", "experts"]),
        (NEMOTRON | {"n_groups": 3}, ["n_groups", "8 heads"]),
        (KIMI | {"linear_attn_config": {"kda_layers": [0], "full_attn_layers": [1]}}, ["kda_layers"]),
        (KIMI | {"linear_attn_config": {"head_dim": "wide"}}, ["linear_attn_config", "head_dim"]),
        (KIMI | {"moe_router_activation_func": "softmax"}, ["moe_router_activation_func", "sigmoid"]),
        (FALCON | {"projectors_bias": True}, ["projectors_bias", "mamba_proj_bias"]),
        (FALCON | {"ssm_multipliers": [1.0]}, ["ssm_multipliers"]),
        (FALCON | {"key_multiplier": "big"}, ["key_multiplier"]),
        (GRANITE | {"layer_types": ["mamba"]}, ["layer_types", "1", "3"]),
        (QWEN | {"layer_types": ["full_attention", "mamba", "full_attention"]}, ["layer_types", "mamba"]),
        (QWEN | {"linear_num_key_heads": 3}, ["linear_num_value_heads 32", "linear_num_key_heads 3"]),
        (QWEN | {"rope_parameters": 4}, ["rope_parameters"]),
    ],
)
def test_refuses(fields: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, fields)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in ["config.json", *words]), message

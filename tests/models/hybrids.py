"""Tiny models with recurrent layers: config classes, and sizes beyond those of make.py."""

from typing import Any

from transformers import BambaConfig, Lfm2Config, Mamba2Config, PreTrainedConfig, Qwen3NextConfig

HYBRIDS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "bamba": (
        BambaConfig,
        {
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
        },
    ),
    "lfm2": (Lfm2Config, {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3_next": (
        Qwen3NextConfig,
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "mamba2": (
        Mamba2Config,
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    ),
}

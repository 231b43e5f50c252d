"""Tiny models with recurrent layers: config classes, and sizes beyond those of make.py."""

from typing import Any

from transformers import (
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
)

MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
QWEN_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

HYBRIDS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "bamba": (BambaConfig, MAMBA2 | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon_h1": (
        FalconH1Config,
        MAMBA2
        | {
            "mamba_d_ssm": 128,
            "head_dim": 24,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.6,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.8, 1.2, 0.9, 1.4, 0.6],
            "mlp_multipliers": [1.4, 0.7],
        },
    ),
    "falcon_mamba": (FalconMambaConfig, {"state_size": 8, "num_hidden_layers": 3}),
    "granite_hybrid": (
        GraniteMoeHybridConfig,
        MAMBA2
        | {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "jamba": (
        JambaConfig,
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "mamba_d_state": 8,
        },
    ),
    "kimi_linear": (
        KimiLinearConfig,
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3],
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "pad_token_id": None,
        },
    ),
    "lfm2": (Lfm2Config, {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2_moe": (
        Lfm2MoeConfig,
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "mamba": (MambaConfig, {"state_size": 8, "num_hidden_layers": 3}),
    "mamba2": (
        Mamba2Config,
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "nemotron_h": (
        NemotronHConfig,
        {
            "layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 20,
        },
    ),
    "olmo_hybrid": (
        OlmoHybridConfig,
        DELTA
        | {
            # transformers writes the convolution of queries, keys and values as three of one size
            "linear_num_key_heads": 4,
            "linear_value_head_dim": 16,
            "pad_token_id": None,
        },
    ),
    "qwen3_5": (Qwen3_5TextConfig, DELTA | {"head_dim": 32}),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, DELTA | QWEN_EXPERTS | {"head_dim": 32}),
    "zamba2": (
        Zamba2Config,
        {
            "num_hidden_layers": 6,
            "layers_block_type": ["linear_attention", *["hybrid"] * 4, "linear_attention"],
            "num_key_value_heads": 4,
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "use_mem_rope": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_next": (Qwen3NextConfig, DELTA | QWEN_EXPERTS | {"head_dim": 32}),
}

"""Sizes of the tiny checkpoints of families of 2026; make.py has the rest."""

from typing import Any

from transformers import (
    AfmoeConfig,
    ApertusConfig,
    DbrxConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HYV3Config,
    LongcatFlashConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    PreTrainedConfig,
)

LOCAL = {
    "num_hidden_layers": 3,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GRANITE = LOCAL | {
    "layer_rope_theta": [10000.0, 0.0, 1000.0],
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
NEWER: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "afmoe": (
        AfmoeConfig,
        LOCAL | EXPERTS | {"head_dim": 16, "num_shared_experts": 2, "route_scale": 1.5, "mup_enabled": True},
    ),
    "apertus": (ApertusConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "dbrx": (
        DbrxConfig,
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.3, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 3},
        },
    ),
    "granite_swa": (GraniteSWAConfig, GRANITE),
    "granite_moe_swa": (
        GraniteMoeSWAConfig,
        GRANITE
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
        },
    ),
    "hy3": (HYV3Config, EXPERTS | {"num_hidden_layers": 3, "head_dim": 16, "router_scaling_factor": 1.5}),
    "longcat": (
        LongcatFlashConfig,
        {
            "num_hidden_layers": 4,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 24,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "head_dim": 8,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "n_routed_experts": 6,
            "zero_expert_num": 3,
            "moe_topk": 3,
            "routed_scaling_factor": 1.5,
        },
    ),
    "mellum": (
        MellumConfig,
        LOCAL
        | EXPERTS
        | {"num_local_experts": 8, "head_dim": 16, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "mimo_v2": (
        MiMoV2FlashConfig,
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "v_head_dim": 16,
            "num_key_value_heads": 1,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
                for kind, theta in (("full_attention", 1e5), ("sliding_attention", 1e4))
            },
        },
    ),
}

"""Sizes of the tiny checkpoints of families of 2026; make.py has the rest."""

from typing import Any

from transformers import (
    AfmoeConfig,
    ApertusConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HYV3Config,
    MellumConfig,
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
    "mellum": (
        MellumConfig,
        LOCAL
        | EXPERTS
        | {"num_local_experts": 8, "head_dim": 16, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
}

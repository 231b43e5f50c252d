"""Sizes of the tiny checkpoints of dense families with layer norms, biases and parallel blocks; make.py has
the rest."""

from typing import Any

from transformers import (
    CwmConfig,
    FalconConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GPTNeoXConfig,
    HeliumConfig,
    HyperCLOVAXConfig,
    Jais2Config,
    Ministral3Config,
    MinistralConfig,
    NemotronConfig,
    OlmoConfig,
    PhiConfig,
    PreTrainedConfig,
    StableLmConfig,
    VaultGemmaConfig,
    YoutuConfig,
)

HALF_ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
DENSE: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "gemma3n": (
        Gemma3nTextConfig,
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "num_hidden_layers": 6,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "vocab_size_per_layer_input": 256,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "altup_num_inputs": 3,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.6, 0.0],
            "pad_token_id": 0,
        },
    ),
    "gemma4": (
        Gemma4TextConfig,
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "tie_word_embeddings": True,
            "num_hidden_layers": 6,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 259,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 6.0,
            "pad_token_id": 0,
        },
    ),
    "ministral3": (
        Ministral3Config,
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "cwm": (CwmConfig, {"head_dim": 16, "num_hidden_layers": 3, **WINDOWS}),
    "falcon": (FalconConfig, {"multi_query": True, "num_kv_heads": 4}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "helium": (HeliumConfig, {"head_dim": 16, "pad_token_id": 0}),
    "hyperclovax": (
        HyperCLOVAXConfig,
        {"embedding_multiplier": 3.0, "logits_scaling": 0.4, "residual_multiplier": 0.4, "pad_token_id": 0},
    ),
    "jais2": (Jais2Config, {"head_dim": 16}),
    "ministral": (MinistralConfig, {"num_hidden_layers": 3, "head_dim": 16, **WINDOWS}),
    "nemotron": (NemotronConfig, {"head_dim": 16}),
    "olmo": (OlmoConfig, {"clip_qkv": 0.3}),
    "phi": (PhiConfig, HALF_ROTATED),
    "stablelm": (StableLmConfig, {"use_qkv_bias": True, **HALF_ROTATED}),
    "vaultgemma": (
        VaultGemmaConfig,
        {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 7, "num_hidden_layers": 3},
    ),
    "youtu": (
        YoutuConfig,
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
}
# further cases: name -> family and what is otherwise
DENSE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in DENSE},
    "falcon new decoder": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "tie_word_embeddings": True},
    ),
    "falcon new decoder, one norm": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 80,
        },
    ),
    "falcon one behind the other": (
        "falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True, "activation": "gelu_new"},
    ),
    "falcon biases by distance": (
        "falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "gpt_neox one behind the other": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
    ),
    "hyperclovax no norms behind blocks": ("hyperclovax", {"use_post_norm": False}),
    "gemma4 keys as values, nothing for layers": (
        "gemma4",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    "ministral all windows": ("ministral", {"layer_types": None}),
    "nemotron biases": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "stablelm in parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
}

"""Tiny random checkpoints of each family, made by transformers from fixed seeds, in the layout that real ones
have."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FlexOlmoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Llama4TextConfig,
    LlamaConfig,
    MiniCPM3Config,
    MiniMaxM2Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    Starcoder2Config,
    Step3p7TextConfig,
)

from tests.models.dense import DENSE
from tests.models.gpts import GPTS
from tests.models.hybrids import HYBRIDS
from tests.models.newer import NEWER
from tests.models.step3 import SIZES as STEP3

# transformers' own table has its wrapper alone
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIALS)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 258,
}

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24}
SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
GRANITE = {
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
LATENT = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}

LOCAL = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 1.5, 3.0, 6.0],
    "original_max_position_embeddings": 512,
}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "deepseek_v2": (DeepseekV2Config, LATENT | {"n_shared_experts": 2, "routed_scaling_factor": 1.5}),
    "deepseek_v3": (DeepseekV3Config, LATENT | {"n_group": 4, "topk_group": 2}),
    "deepseek_v32": (
        DeepseekV32Config,
        LATENT
        | {
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "index_topk": 12,
            "index_head_dim": 16,
            "index_n_heads": 16,  # of fewer all may be 0 for a token, and then tokens are tied
        },
    ),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 7,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "head_dim": 16,
            "sliding_window": 7,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "truncate": False,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mixtral": (
        MixtralConfig,
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": None},
    ),
    "dots1": (Dots1Config, SIGMOID | {"sliding_window": None, "norm_topk_prob": True}),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig,
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "num_hidden_layers": 3,
        },
    ),
    "exaone_moe": (
        ExaoneMoeConfig,
        EXPERTS | {"num_hidden_layers": 4, "sliding_window": 9, "num_shared_experts": 2},
    ),
    "flex_olmo": (
        FlexOlmoConfig,
        {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "pad_token_id": None},
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        SIGMOID | {"head_dim": 32, "use_qk_norm": True, "num_nextn_predict_layers": 0},
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, LATENT | {"first_k_dense_replace": 1, "rms_norm_eps": 1e-5}),
    "glm_moe_dsa": (
        GlmMoeDsaConfig,
        LATENT | {"n_shared_experts": 1, "index_topk": 12, "index_head_dim": 16, "index_n_heads": 16},
    ),
    "granite_moe": (GraniteMoeConfig, LOCAL_EXPERTS | GRANITE),
    "granite_moe_shared": (
        GraniteMoeSharedConfig,
        LOCAL_EXPERTS | GRANITE | {"shared_intermediate_size": 40},
    ),
    "hunyuan_moe": (
        HunYuanMoEV1Config,
        {"num_experts": 8, "moe_topk": 3, "intermediate_size": 24, "head_dim": 32, "pad_token_id": None},
    ),
    "llama4": (
        Llama4TextConfig,
        LOCAL_EXPERTS
        | {
            "num_experts_per_tok": 1,
            "head_dim": 16,
            "intermediate_size_mlp": 72,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
            "attention_chunk_size": 12,
            "floor_scale": 8,
            "pad_token_id": None,
        },
    ),
    "minimax_m2": (MiniMaxM2Config, LOCAL_EXPERTS | {"head_dim": 32, "rotary_dim": 16}),
    "olmoe": (OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24}),
    "phimoe": (
        PhimoeConfig,
        LOCAL_EXPERTS | {"num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    ),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "qwen2_moe": (Qwen2MoeConfig, EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "arcee": (ArceeConfig, {}),
    "cohere": (CohereConfig, {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": (Cohere2Config, {"logit_scale": 0.25, "num_hidden_layers": 3, **LOCAL}),
    "ernie4_5": (Ernie4_5Config, {"use_bias": True, "head_dim": 16}),
    "exaone4": (Exaone4Config, {"num_hidden_layers": 3, **LOCAL}),
    "gemma": (GemmaConfig, {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
            **LOCAL,
        },
    ),
    "glm": (GlmConfig, {"head_dim": 16, "pad_token_id": 0}),
    "glm4": (Glm4Config, {"head_dim": 16, "pad_token_id": 0}),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
    ),
    "hunyuan": (
        HunYuanDenseV1Config,
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
        },
    ),
    "minicpm3": (
        MiniCPM3Config,
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "scale_emb": 3,
            "dim_model_base": 32,
            "scale_depth": 1.4,
        },
    ),
    "mistral4": (
        Mistral4Config,
        LATENT
        | {
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "n_group": 2,
            "topk_group": 1,
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "olmo2": (Olmo2Config, {}),
    "olmo3": (Olmo3Config, {"num_hidden_layers": 3, **LOCAL}),
    "phi3": (Phi3Config, {"pad_token_id": 0, "rope_parameters": LONGROPE}),
    "seed_oss": (SeedOssConfig, {"head_dim": 16}),
    "solar_open": (SolarOpenConfig, SIGMOID | {"head_dim": 16, "first_k_dense_replace": 0}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0], "pad_token_id": 0}),
    "starcoder2": (Starcoder2Config, {"sliding_window": 7}),
    "step3": (Step3p7TextConfig, STEP3),
    **DENSE,
    **GPTS,
    **HYBRIDS,
    **NEWER,
}


def make_checkpoint(
    family: str,
    folder: str | Path,
    *,
    seed: int = 0,
    shard_size: str = "1GB",
    dtype: str = "float32",
    stacked: bool = False,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint with a byte-level tokenizer to `folder`; `overrides` go to the config class.

    A small `shard_size` makes several files of it; `stacked` writes the experts of a layer as one tensor.
    """
    folder = Path(folder)
    kind, own = FAMILIES[family]
    model = make_model(kind(**(SIZES | own | overrides)), seed).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard_size, save_original_format=not stacked)
    write_tokenizer(folder)
    return folder


def make_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Weights large enough that tokens differ and that biases, norms and positions matter."""
    torch.manual_seed(seed)
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Gives a model weights of the current seed, as `make_model` has them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3 if "embed" in name else 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.15)
    return model


def write_tokenizer(folder: Path) -> None:
    """One token a byte, ids 0..255, and three special tokens: every text can be encoded, every id decoded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "bos_token": "<|endoftext|>",
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )

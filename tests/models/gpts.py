"""Sizes of the tiny checkpoints of GPT-2's line and of BLOOM and MPT; make.py has the rest."""

from typing import Any

from transformers import (
    BloomConfig,
    CodeGenConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    MptConfig,
    OPTConfig,
    PreTrainedConfig,
)

TIED = {"tie_word_embeddings": True}
GPTS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "bloom": (BloomConfig, TIED),
    "codegen": (CodeGenConfig, {"rotary_dim": 8, "n_ctx": 512}),
    "gpt2": (GPT2Config, TIED),
    "gpt_bigcode": (GPTBigCodeConfig, TIED),
    "gpt_neo": (
        GPTNeoConfig,
        TIED
        | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 7},
    ),
    "gptj": (GPTJConfig, {"rotary_dim": 8}),
    "mpt": (MptConfig, TIED),
    "opt": (OPTConfig, TIED | {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 0}),
}
# further cases: name -> family and what is otherwise
GPT_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in GPTS},
    "bloom six heads": ("bloom", {"hidden_size": 96, "num_attention_heads": 6}),
    "mpt six heads, clamped": (
        "mpt",
        {"hidden_size": 96, "num_attention_heads": 6, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}},
    ),
    "gpt2 own head, wide, plain scores": (
        "gpt2",
        {"tie_word_embeddings": False, "n_inner": 80, "scale_attn_weights": False},
    ),
    "gptj more rotated": ("gptj", {"rotary_dim": 16, "n_inner": 80}),
}

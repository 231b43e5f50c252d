"""Decoders whose only positions are linear biases by distance (ALiBi, Press et al., 2022), BLOOM and MPT:
readers of their config.json, and their rows (family.py). Torch-free."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config import sizes
from runtime.models.config.block import Alibi
from runtime.models.config.families import Positive, decoded
from runtime.models.config.family import Family
from runtime.models.config.renames import NEOX_MLP
from runtime.models.config.rope_config import NO_ROPE


class HfBloom(Struct, frozen=True, kw_only=True):
    """Keys of BLOOM."""

    hidden_size: sizes.Width
    num_attention_heads: sizes.Heads
    apply_residual_connection_post_layernorm: bool = False


def bloom_keys(raw: Fields) -> Fields:
    """Sizes that follow from others. Raises ModelError for residuals that begin behind norms."""
    hf = decoded(raw, HfBloom)
    if hf.apply_residual_connection_post_layernorm:
        raise ModelError(
            "config.json: apply_residual_connection_post_layernorm true is not supported; supported is false"
        )
    return {"intermediate_size": 4 * hf.hidden_size, "num_key_value_heads": hf.num_attention_heads}


def bloom(raw: Fields) -> Fields:
    """Biases by distance, and a norm behind the embedding."""
    return {"rope": NO_ROPE, "alibi": Alibi(), "has_embed_norm": True}


class HfMptAttention(Struct, frozen=True, kw_only=True):
    """`attn_config` of MPT."""

    attn_type: Literal["multihead_attention"] = "multihead_attention"
    clip_qkv: Positive | None = None
    softmax_scale: Positive | None = None
    prefix_lm: bool = False
    qk_ln: bool = False
    alibi: bool = True
    alibi_bias_max: Positive = 8.0


class HfMpt(Struct, frozen=True, kw_only=True):
    """Keys of MPT."""

    hidden_size: sizes.Width
    num_attention_heads: sizes.Heads
    expansion_ratio: A[int, Meta(gt=0, le=64)] = 4
    no_bias: bool = True
    logit_scale: Positive | None = None
    attn_config: HfMptAttention = HfMptAttention()


def mpt_keys(raw: Fields) -> Fields:
    """Sizes that follow from others. Raises ModelError for what no released MPT has."""
    hf = decoded(raw, HfMpt)
    own = hf.attn_config
    for name, is_other in (
        ("no_bias", not hf.no_bias),
        ("attn_config.alibi", not own.alibi),
        ("attn_config.prefix_lm", own.prefix_lm),
        ("attn_config.qk_ln", own.qk_ln),
    ):
        if is_other:
            value = "false" if name in ("no_bias", "attn_config.alibi") else "true"
            raise ModelError(f"config.json: {name} {value} is not supported for MPT")
    return {
        "intermediate_size": hf.expansion_ratio * hf.hidden_size,
        "num_key_value_heads": hf.num_attention_heads,
    }


def mpt(raw: Fields) -> Fields:
    """Biases by distance; clamped queries, keys and values, and a scale of scores, in some models."""
    hf = decoded(raw, HfMpt)
    own = hf.attn_config
    return {
        "rope": NO_ROPE,
        "alibi": Alibi(max_bias=own.alibi_bias_max),
        "qkv_clip": own.clip_qkv or 0.0,
        "score_factor": own.softmax_scale or 0.0,
        "logit_scale": hf.logit_scale or 1.0,
    }


ALIBI = {
    "Bloom": Family(
        model_class="runtime.models.bloom:Bloom",
        norm="layer",
        keys=(
            ("n_embed", "hidden_size"),
            ("n_layer", "num_hidden_layers"),
            ("n_head", "num_attention_heads"),
            ("seq_length", "max_position_embeddings"),
            ("layer_norm_epsilon", "rms_norm_eps"),
        ),
        defaults={"rms_norm_eps": 1e-5},
        prepare=bloom_keys,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        is_gated=False,
        is_tied=True,
        activation="gelu_new",
        fused={"query_key_value": "groups"},
        read=bloom,
        renames=(
            *NEOX_MLP,
            ("transformer.", ""),
            ("h.", "layers."),
            ("word_embeddings_layernorm.", "embed_norm."),
            ("word_embeddings.", "embed_tokens."),
            ("ln_f.", "norm."),
            (".self_attention.dense.", ".self_attn.o_proj."),
            (".self_attention.", ".self_attn."),
        ),
    ),
    **dict.fromkeys(  # under the name in the first checkpoints, and under that of transformers
        ("MPT", "Mpt"),
        Family(
            norm="layer_unbiased",
            keys=(
                ("d_model", "hidden_size"),
                ("n_layers", "num_hidden_layers"),
                ("n_heads", "num_attention_heads"),
                ("max_seq_len", "max_position_embeddings"),
                ("layer_norm_epsilon", "rms_norm_eps"),
            ),
            defaults={"rms_norm_eps": 1e-5},
            prepare=mpt_keys,
            qkv_bias=False,
            o_bias=False,
            is_gated=False,
            is_tied=True,
            activation="gelu",
            fused={"Wqkv": "qkv"},
            read=mpt,
            renames=(
                ("transformer.", ""),
                ("blocks.", "layers."),
                ("wte.", "embed_tokens."),
                ("norm_f.", "norm."),
                (".norm_1.", ".input_layernorm."),
                (".norm_2.", ".post_attention_layernorm."),
                (".attn.out_proj.", ".self_attn.o_proj."),
                (".attn.", ".self_attn."),
                (".ffn.up_proj.", ".mlp.up."),
                (".ffn.down_proj.", ".mlp.down."),
            ),
        ),
    ),
}

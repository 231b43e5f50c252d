"""Families with experts of 2025 and 2026 whose rows need nothing but data: readers of their config.json, and
the rows (family.py). Torch-free."""

from typing import Annotated as A

from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config import moe_families as experts
from runtime.models.config import sizes
from runtime.models.config.dense_families import granite_swa
from runtime.models.config.families import HfLayers, decoded, rope_in_local_layers
from runtime.models.config.family import Family
from runtime.models.config.longcat_config import LONGCAT
from runtime.models.config.mimo_config import MIMO
from runtime.models.config.renames import DBRX_NAMES, GRANITE_NAMES


class HfAfmoe(HfLayers, frozen=True, kw_only=True):
    """Keys of AFMoE."""

    hidden_size: sizes.Width
    head_dim: A[int, Meta(gt=0, le=4096)] = 128
    mup_enabled: bool = False


def afmoe(raw: Fields) -> Fields:
    """Layers that see everything have no positions, each number of a head's attention output has a gate, and
    embeddings may be scaled. Raises ModelError."""
    hf = decoded(raw, HfAfmoe)
    if hf.layer_types is None:
        raise ModelError("config.json has no layer_types; name full_attention or sliding_attention by layer")
    scale = {"embed_scale": hf.hidden_size**0.5} if hf.mup_enabled else {}
    return rope_in_local_layers(raw) | scale | {"gate_dim": hf.head_dim}


class HfDbrxAttention(Struct, frozen=True, kw_only=True):
    """Keys of attention of DBRX."""

    kv_n_heads: sizes.Heads = 1
    clip_qkv: A[float, Meta(gt=0)] | None = None
    rope_theta: A[float, Meta(gt=0)] | None = None


class HfDbrxActivation(Struct, frozen=True, kw_only=True):
    """Keys of the activation of DBRX."""

    name: str = "silu"


class HfDbrxExperts(Struct, frozen=True, kw_only=True):
    """Keys of experts of DBRX."""

    ffn_hidden_size: sizes.Width = 3584
    moe_num_experts: sizes.Experts = 4
    moe_top_k: sizes.Experts = 1
    moe_normalize_expert_weights: float | None = 1.0
    ffn_act_fn: HfDbrxActivation | None = None


class HfDbrx(Struct, frozen=True, kw_only=True):
    """Keys of DBRX."""

    attn_config: HfDbrxAttention = HfDbrxAttention()
    ffn_config: HfDbrxExperts = HfDbrxExperts()


def dbrx_keys(raw: Fields) -> Fields:
    """Keys of HfConfig and HfMoeConfig out of the objects for attention and experts. Raises ModelError."""
    hf = decoded(raw, HfDbrx)
    attention, moe = hf.attn_config, hf.ffn_config
    if moe.moe_normalize_expert_weights not in (None, 1.0):
        raise ModelError(
            f"config.json: moe_normalize_expert_weights {moe.moe_normalize_expert_weights} is not supported; "
            "supported are 1 and null"
        )
    found = {
        "num_key_value_heads": attention.kv_n_heads,
        "intermediate_size": moe.ffn_hidden_size,
        "num_experts": moe.moe_num_experts,
        "num_experts_per_tok": moe.moe_top_k,
        "norm_topk_prob": moe.moe_normalize_expert_weights is not None,
        "hidden_act": (moe.ffn_act_fn or HfDbrxActivation()).name,
    }
    theta = attention.rope_theta
    return found if theta is None or "rope_parameters" in raw else found | {"rope_theta": theta}


def dbrx(raw: Fields) -> Fields:
    """Queries, keys and values are clamped in some models."""
    return {"qkv_clip": decoded(raw, HfDbrx).attn_config.clip_qkv or 0.0}


RECENT = {
    "Afmoe": Family(
        model_class="runtime.models.step3:Step3",
        qk_norm="head",
        placement="both",
        keys=(("num_dense_layers", "first_k_dense_replace"), ("route_scale", "routed_scaling_factor")),
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
        moe=experts.deepseek3_behind_one,
        read=afmoe,
        renames=(
            (".self_attn.gate_proj.", ".self_attn.g_proj."),
            ("post_attention_layernorm.", "attention_output_norm."),
            ("pre_mlp_layernorm.", "post_attention_layernorm."),
            ("post_mlp_layernorm.", "mlp_output_norm."),
            (".mlp.router.gate.", ".mlp.gate."),
            (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
        ),
    ),
    "Dbrx": Family(
        norm="layer_unbiased",
        keys=(
            ("d_model", "hidden_size"),
            ("n_heads", "num_attention_heads"),
            ("n_layers", "num_hidden_layers"),
            ("max_seq_len", "max_position_embeddings"),
        ),
        defaults={"rms_norm_eps": 1e-5},
        qkv_bias=False,
        o_bias=False,
        fused={"Wqkv": "qkv"},
        prepare=dbrx_keys,
        moe=experts.olmoe,
        read=dbrx,
        renames=DBRX_NAMES,
    ),
    "GraniteMoeSWA": Family(moe=experts.granite, has_sinks=True, read=granite_swa, renames=GRANITE_NAMES),
    "HYV3": Family(
        qk_norm="head",
        head_dim=128,
        defaults={"rope_theta": 11158840.0, "rms_norm_eps": 1e-5},
        keys=(("router_scaling_factor", "routed_scaling_factor"),),
        moe=experts.deepseek3_behind_one,
        renames=(
            (".mlp.router.gate.", ".mlp.gate."),
            (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
            (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
            (".shared_mlp.", ".shared_experts."),
        ),
    ),
    "LongcatFlash": LONGCAT,
    "MiMoV2Flash": MIMO,
}

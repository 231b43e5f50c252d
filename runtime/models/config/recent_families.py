"""Families with experts of 2025 and 2026 whose rows need nothing but data: readers of their config.json, and
the rows (family.py). Torch-free."""

from typing import Annotated as A

from msgspec import Meta

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config import moe_families as experts
from runtime.models.config import sizes
from runtime.models.config.dense_families import granite_swa
from runtime.models.config.families import HfLayers, decoded, rope_in_local_layers
from runtime.models.config.family import Family
from runtime.models.config.renames import GRANITE_NAMES


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
}

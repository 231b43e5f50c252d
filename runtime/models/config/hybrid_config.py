"""Families with recurrent layers: what their config.json says of these, and the keys of their own that stand
for keys that all decoders share; here LFM 2, others in mamba_config.py and delta_config.py. Torch-free.

Each function of a family takes config.json and returns a Hybrid. Raises ModelError for what is not supported.
"""

from typing import Annotated as A

from msgspec import Meta, Struct

from runtime.json_value import Fields, JsonDict
from runtime.models.config import sizes
from runtime.models.config.families import decoded
from runtime.models.config.recurrent_config import LayerKind, Mamba1, Mamba2, Recurrent, ShortConv, kinds_of
from runtime.models.config.rope_config import NO_ROPE

Kernel = A[int, Meta(ge=2, le=64)]
Eps = A[float, Meta(ge=0)]


class Hybrid(Struct, frozen=True):
    """What config.json says of recurrent layers."""

    recurrent: Recurrent
    keys: JsonDict  # by the names that all decoders share


class HfLayerCount(Struct, frozen=True, kw_only=True):
    """The number of layers."""

    num_hidden_layers: sizes.Layers


def without_positions(raw: Fields) -> Fields:
    """No layer has positions."""
    return {"layer_ropes": (NO_ROPE,) * decoded(raw, HfLayerCount).num_hidden_layers}


def without_attention(mixer: Mamba1 | Mamba2, num_layers: int, num_heads: int, eps: float) -> Hybrid:
    """A model of recurrent layers alone, whose sequences may have any length."""
    kind: LayerKind = "recurrent"
    return Hybrid(
        Recurrent(kinds=(kind,) * num_layers, mixer=mixer, has_feed_forward=False),
        {
            "rms_norm_eps": eps,
            "intermediate_size": mixer.inner,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": 2,  # no layer attends
            "max_position_embeddings": 1 << 20,
        },
    )


class HfLfm2(Struct, frozen=True, kw_only=True):
    """Keys of LFM 2."""

    hidden_size: sizes.Width
    intermediate_size: sizes.Width
    num_hidden_layers: sizes.Layers
    layer_types: list[str] | None = None
    full_attn_idxs: list[int] | None = None
    conv_L_cache: Kernel = 3
    conv_bias: bool = False
    block_ff_dim: sizes.Width | None = None
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: A[float, Meta(gt=0, le=64)] | None = 1.0
    block_multiple_of: sizes.Width = 256
    norm_eps: A[float, Meta(ge=0)] = 1e-5


def lfm2(raw: JsonDict) -> Hybrid:
    """LFM 2: gated short convolutions, and attention with normalized heads in some layers."""
    hf = decoded(raw, HfLfm2)
    attends = hf.full_attn_idxs or range(hf.num_hidden_layers)
    names = hf.layer_types or [
        "full_attention" if i in attends else "conv" for i in range(hf.num_hidden_layers)
    ]
    kinds = kinds_of(
        names, {"full_attention": "attention", "conv": "recurrent"}, "layer_types", hf.num_hidden_layers
    )
    inner = hf.block_ff_dim or hf.intermediate_size
    if hf.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        if hf.block_ffn_dim_multiplier is not None:
            inner = int(hf.block_ffn_dim_multiplier * inner)
            inner = -(-inner // hf.block_multiple_of) * hf.block_multiple_of
    mixer = ShortConv(width=hf.hidden_size, kernel=hf.conv_L_cache, has_bias=hf.conv_bias)
    return Hybrid(
        Recurrent(kinds=kinds, mixer=mixer),
        {"intermediate_size": inner, "rms_norm_eps": hf.norm_eps, "layer_types": None},
    )

"""Families with recurrent layers: what their config.json says of these, and the keys of their own that stand
for keys that all decoders share. Torch-free.

Each function of a family takes config.json and returns a Hybrid. Raises ModelError for what is not supported.
"""

import math
from typing import Annotated as A
from typing import TypeVar

import msgspec
from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import JsonDict, JsonValue
from runtime.models.config import sizes
from runtime.models.config.recurrent_config import (
    GatedDelta,
    LayerKind,
    Mamba2,
    Recurrent,
    ShortConv,
    kinds_of,
)

T = TypeVar("T")
Kernel = A[int, Meta(ge=2, le=64)]


# names of a checkpoint's tensors -> ours
MAMBA2_NAMES = (
    ("backbone.", ""),
    ("embeddings.", "embed_tokens."),
    ("mixer.norm.", "mixer.gated_norm."),
    (".norm.", ".input_layernorm."),
    ("norm_f.", "norm."),
)


BAMBA_NAMES = (
    (".mamba.norm.", ".mamba.gated_norm."),
    (".mamba.", ".mixer."),
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("final_layernorm.", "norm."),
)
LFM2_NAMES = (
    (".conv.conv.", ".mixer.conv."),
    (".conv.in_proj.", ".mixer.in_proj."),
    (".conv.out_proj.", ".mixer.out_proj."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    ("embedding_norm.", "norm."),
)
QWEN3_NEXT_NAMES = ((".linear_attn.norm.", ".linear_attn.gated_norm."), (".linear_attn.", ".mixer."))


class Hybrid(Struct, frozen=True):
    """What config.json says of recurrent layers."""

    recurrent: Recurrent
    keys: JsonDict  # by the names that all decoders share


def _decoded(raw: JsonDict, kind: type[T]) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ModelError(
            f"config.json cannot be read: {error}; restore the file from the model's source"
        ) from None


def _limits(value: JsonValue) -> tuple[float, float]:
    """Bounds of time steps; infinity is written in several ways."""
    if not isinstance(value, list) or len(value) != 2:
        return 0.0, math.inf
    low, high = (float(bound) if isinstance(bound, int | float | str) else math.inf for bound in value)
    return low, high


class HfMamba2(Struct, frozen=True, kw_only=True):
    """Keys of Mamba 2."""

    hidden_size: sizes.Width
    num_hidden_layers: sizes.Layers
    num_heads: sizes.Heads
    head_dim: sizes.Width
    state_size: sizes.Width
    n_groups: sizes.Heads = 8
    conv_kernel: Kernel = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_norm_epsilon: A[float, Meta(ge=0)] = 1e-5


def mamba2(raw: JsonDict) -> Hybrid:
    """Mamba 2: recurrent layers alone, without feed-forwards and without limits of the context."""
    hf = _decoded(raw, HfMamba2)
    mixer = Mamba2(
        num_heads=hf.num_heads,
        head_dim=hf.head_dim,
        state_dim=hf.state_size,
        num_groups=hf.n_groups,
        kernel=hf.conv_kernel,
        has_conv_bias=hf.use_conv_bias,
        has_bias=hf.use_bias,
        eps=hf.layer_norm_epsilon,
        step_limits=_limits(raw.get("time_step_limit")),
    )
    kind: LayerKind = "recurrent"
    return Hybrid(
        Recurrent(kinds=(kind,) * hf.num_hidden_layers, mixer=mixer, has_feed_forward=False),
        {
            "rms_norm_eps": hf.layer_norm_epsilon,
            "intermediate_size": mixer.inner,
            "num_attention_heads": hf.num_heads,
            "num_key_value_heads": hf.num_heads,
            "max_position_embeddings": 1 << 20,
        },
    )


class HfBamba(Struct, frozen=True, kw_only=True):
    """Keys of Bamba."""

    hidden_size: sizes.Width
    num_hidden_layers: sizes.Layers
    attn_layer_indices: list[int] | None = None
    mamba_n_heads: sizes.Heads = 128
    mamba_d_head: sizes.Width | str = "auto"
    mamba_n_groups: sizes.Heads = 1
    mamba_d_state: sizes.Width = 256
    mamba_d_conv: Kernel = 4
    mamba_expand: A[int, Meta(ge=1, le=64)] = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    rms_norm_eps: A[float, Meta(ge=0)] = 1e-5


def bamba(raw: JsonDict) -> Hybrid:
    """Bamba: layers of Mamba 2 with feed-forwards, and attention in some of them."""
    hf = _decoded(raw, HfBamba)
    dim = hf.mamba_d_head
    mixer = Mamba2(
        num_heads=hf.mamba_n_heads,
        head_dim=dim if isinstance(dim, int) else hf.mamba_expand * hf.hidden_size // hf.mamba_n_heads,
        state_dim=hf.mamba_d_state,
        num_groups=hf.mamba_n_groups,
        kernel=hf.mamba_d_conv,
        has_conv_bias=hf.mamba_conv_bias,
        has_bias=hf.mamba_proj_bias,
        eps=hf.rms_norm_eps,
        step_limits=_limits(raw.get("time_step_limit")),
    )
    attends = hf.attn_layer_indices or []
    kinds: tuple[LayerKind, ...] = tuple(
        "attention" if i in attends else "recurrent" for i in range(hf.num_hidden_layers)
    )
    # half of each head is rotated, whether config.json says so or not
    rope = raw.get("rope_parameters")
    keys: JsonDict = {"partial_rotary_factor": 0.5}
    if isinstance(rope, dict):
        keys["rope_parameters"] = {"partial_rotary_factor": 0.5, **rope}
    return Hybrid(Recurrent(kinds=kinds, mixer=mixer), keys | {"rms_norm_eps": hf.rms_norm_eps})


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
    hf = _decoded(raw, HfLfm2)
    attends = hf.full_attn_idxs or range(hf.num_hidden_layers)
    names = hf.layer_types or [
        "full_attention" if i in attends else "conv" for i in range(hf.num_hidden_layers)
    ]
    kinds = kinds_of(names, {"full_attention": "attention", "conv": "recurrent"}, "layer_types")
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


class HfQwen3Next(Struct, frozen=True, kw_only=True):
    """Keys of Qwen3-Next and Qwen3.5."""

    num_hidden_layers: sizes.Layers
    layer_types: list[str] | None = None
    full_attention_interval: A[int, Meta(ge=1)] = 4
    linear_num_key_heads: sizes.Heads = 16
    linear_num_value_heads: sizes.Heads = 32
    linear_key_head_dim: sizes.Width = 128
    linear_value_head_dim: sizes.Width = 128
    linear_conv_kernel_dim: Kernel = 4
    rms_norm_eps: A[float, Meta(ge=0)] = 1e-6


def qwen3_next(raw: JsonDict) -> Hybrid:
    """Qwen3-Next: gated delta nets, and gated attention in every fourth layer."""
    hf = _decoded(raw, HfQwen3Next)
    names = hf.layer_types or [
        "linear_attention" if (i + 1) % hf.full_attention_interval else "full_attention"
        for i in range(hf.num_hidden_layers)
    ]
    if hf.linear_num_value_heads % hf.linear_num_key_heads:
        raise ModelError(
            f"config.json: linear_num_value_heads {hf.linear_num_value_heads} is not a multiple of "
            f"linear_num_key_heads {hf.linear_num_key_heads}; restore the file from the model's source"
        )
    mixer = GatedDelta(
        key_heads=hf.linear_num_key_heads,
        value_heads=hf.linear_num_value_heads,
        key_dim=hf.linear_key_head_dim,
        value_dim=hf.linear_value_head_dim,
        kernel=hf.linear_conv_kernel_dim,
        eps=hf.rms_norm_eps,
        layout="by_head",
    )
    kinds = kinds_of(names, {"full_attention": "attention", "linear_attention": "recurrent"}, "layer_types")
    rope = raw.get("rope_parameters")
    keys: JsonDict = {"partial_rotary_factor": 0.25, "layer_types": None, "head_dim": 256} | {
        name: raw[name] for name in ("partial_rotary_factor", "head_dim") if raw.get(name) is not None
    }
    if isinstance(rope, dict):
        keys["rope_parameters"] = {"partial_rotary_factor": 0.25, **rope}
    return Hybrid(Recurrent(kinds=kinds, mixer=mixer, gates_attention=True), keys)

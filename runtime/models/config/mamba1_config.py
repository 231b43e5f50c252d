"""Families whose recurrent layers are mixers of Mamba 1: see hybrid_config.py. Torch-free."""

from typing import Annotated as A

from msgspec import Meta, Struct

from runtime.json_value import JsonDict
from runtime.models.config import sizes
from runtime.models.config.families import decoded
from runtime.models.config.hybrid_config import Eps, Hybrid, Kernel, without_attention
from runtime.models.config.recurrent_config import LayerKind, Mamba1, Recurrent


class HfMamba1(Struct, frozen=True, kw_only=True):
    """Keys of Mamba and Falcon Mamba."""

    hidden_size: sizes.Width
    num_hidden_layers: sizes.Layers
    intermediate_size: sizes.Heads | None = None
    expand: A[int, Meta(ge=1, le=64)] = 2
    state_size: sizes.Width = 16
    time_step_rank: sizes.Width | str = "auto"
    conv_kernel: Kernel = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_norm_epsilon: Eps = 1e-5
    mixer_rms_eps: Eps = 1e-6


def mamba1(raw: JsonDict) -> Hybrid:
    """Mamba: recurrent layers alone."""
    return _mamba1(decoded(raw, HfMamba1), has_norm=False)


def falcon_mamba(raw: JsonDict) -> Hybrid:
    """Falcon Mamba: as Mamba, with norms that have no weights."""
    return _mamba1(decoded(raw, HfMamba1), has_norm=True)


def _step_rank(rank: int | str, hidden: int) -> int:
    """mamba_dt_rank or time_step_rank; any word stands for a sixteenth of the hidden size."""
    return rank if isinstance(rank, int) else -(-hidden // 16)


def _mamba1(hf: HfMamba1, *, has_norm: bool) -> Hybrid:
    mixer = Mamba1(
        inner=hf.intermediate_size or hf.expand * hf.hidden_size,
        state_dim=hf.state_size,
        step_rank=_step_rank(hf.time_step_rank, hf.hidden_size),
        kernel=hf.conv_kernel,
        has_conv_bias=hf.use_conv_bias,
        has_bias=hf.use_bias,
        norm="unit" if has_norm else "none",
        eps=hf.mixer_rms_eps,
    )
    return without_attention(mixer, hf.num_hidden_layers, mixer.inner, hf.layer_norm_epsilon)


class HfJamba(Struct, frozen=True, kw_only=True):
    """Keys of Jamba."""

    hidden_size: sizes.Width
    num_hidden_layers: sizes.Layers
    attn_layer_period: A[int, Meta(ge=1, le=4096)] = 8
    attn_layer_offset: A[int, Meta(ge=0, le=4096)] = 4
    mamba_d_state: sizes.Width = 16
    mamba_d_conv: Kernel = 4
    mamba_expand: A[int, Meta(ge=1, le=64)] = 2
    mamba_dt_rank: sizes.Width | str = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    rms_norm_eps: Eps = 1e-6


def jamba(raw: JsonDict) -> Hybrid:
    """Jamba: layers of Mamba, and attention in every so many."""
    hf = decoded(raw, HfJamba)
    mixer = Mamba1(
        inner=hf.mamba_expand * hf.hidden_size,
        state_dim=hf.mamba_d_state,
        step_rank=_step_rank(hf.mamba_dt_rank, hf.hidden_size),
        kernel=hf.mamba_d_conv,
        has_conv_bias=hf.mamba_conv_bias,
        has_bias=hf.mamba_proj_bias,
        norm="weighted",
        eps=hf.rms_norm_eps,
    )
    kinds: tuple[LayerKind, ...] = tuple(
        "attention" if i % hf.attn_layer_period == hf.attn_layer_offset else "recurrent"
        for i in range(hf.num_hidden_layers)
    )
    return Hybrid(Recurrent(kinds=kinds, mixer=mixer), {})

"""Families whose recurrent layers are delta rules: see hybrid_config.py. Torch-free."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonDict
from runtime.models.config import sizes
from runtime.models.config.families import decoded
from runtime.models.config.hybrid_config import Eps, Hybrid, Kernel, without_positions
from runtime.models.config.recurrent_config import GatedDelta, KimiDelta, LayerKind, Recurrent, kinds_of

DELTA_KINDS: dict[str, LayerKind] = {"full_attention": "attention", "linear_attention": "recurrent"}


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
    rms_norm_eps: Eps = 1e-6
    partial_rotary_factor: float = 0.25
    head_dim: sizes.Width = 256
    rope_parameters: JsonDict | None = None


def qwen3_next(raw: JsonDict) -> Hybrid:
    """Qwen3-Next: gated delta nets, and gated attention in every fourth layer."""
    return _qwen(raw, "by_head")


def qwen3_5(raw: JsonDict) -> Hybrid:
    """Qwen3.5: as Qwen3-Next, with projections that are stored otherwise."""
    return _qwen(raw, "qkv")


def _checked(mixer: GatedDelta) -> GatedDelta:
    """Raises ModelError where value heads cannot share key heads."""
    if mixer.value_heads % mixer.key_heads:
        raise ModelError(
            f"config.json: linear_num_value_heads {mixer.value_heads} is not a multiple of "
            f"linear_num_key_heads {mixer.key_heads}; restore the file from the model's source"
        )
    return mixer


def _qwen(raw: JsonDict, layout: Literal["by_head", "qkv"]) -> Hybrid:
    hf = decoded(raw, HfQwen3Next)
    names = hf.layer_types or [
        "linear_attention" if (i + 1) % hf.full_attention_interval else "full_attention"
        for i in range(hf.num_hidden_layers)
    ]
    mixer = GatedDelta(
        key_heads=hf.linear_num_key_heads,
        value_heads=hf.linear_num_value_heads,
        key_dim=hf.linear_key_head_dim,
        value_dim=hf.linear_value_head_dim,
        kernel=hf.linear_conv_kernel_dim,
        eps=hf.rms_norm_eps,
        layout=layout,
    )
    keys: JsonDict = {
        "partial_rotary_factor": hf.partial_rotary_factor,
        "layer_types": None,
        "head_dim": hf.head_dim,
    }
    if hf.rope_parameters is not None:
        keys["rope_parameters"] = {"partial_rotary_factor": 0.25, **hf.rope_parameters}
    kinds = kinds_of(names, DELTA_KINDS, "layer_types", hf.num_hidden_layers)
    return Hybrid(Recurrent(kinds=kinds, mixer=_checked(mixer), gates_attention=True), keys)


class HfOlmoHybrid(Struct, frozen=True, kw_only=True):
    """Keys of OLMo Hybrid."""

    hidden_size: sizes.Width
    num_hidden_layers: sizes.Layers
    num_attention_heads: sizes.Heads
    layer_types: list[str] | None = None
    linear_num_key_heads: sizes.Heads | None = None
    linear_num_value_heads: sizes.Heads | None = None
    linear_key_head_dim: sizes.Width | None = None
    linear_value_head_dim: sizes.Width | None = None
    linear_conv_kernel_dim: Kernel = 4
    linear_allow_neg_eigval: bool = True
    rope_theta: float | None = None
    rope_parameters: JsonDict | None = None


def olmo_hybrid(raw: JsonDict) -> Hybrid:
    """OLMo Hybrid: gated delta nets whose rates reach 2, and attention as OLMo 3 in every fourth layer."""
    hf = decoded(raw, HfOlmoHybrid)
    key_heads = hf.linear_num_key_heads or hf.num_attention_heads
    key_dim = hf.linear_key_head_dim or max(1, 3 * hf.hidden_size // (4 * key_heads))
    mixer = GatedDelta(
        key_heads=key_heads,
        value_heads=hf.linear_num_value_heads or hf.num_attention_heads,
        key_dim=key_dim,
        value_dim=hf.linear_value_head_dim or 2 * key_dim,
        kernel=hf.linear_conv_kernel_dim,
        eps=1e-5,  # that of the library which the model was trained with
        layout="apart",
        max_rate=2.0 if hf.linear_allow_neg_eigval else 1.0,
    )
    count = hf.num_hidden_layers
    names = hf.layer_types or [
        "full_attention" if i % 4 == 3 or i == count - 1 < 3 else "linear_attention" for i in range(count)
    ]
    kinds = kinds_of(names, DELTA_KINDS, "layer_types", count)
    return Hybrid(Recurrent(kinds=kinds, mixer=_checked(mixer)), {"layer_types": None})


def olmo_hybrid_fields(raw: Fields) -> Fields:
    """No positions, unless config.json has a base for rotary ones."""
    hf = decoded(raw, HfOlmoHybrid)
    base = hf.rope_theta or (hf.rope_parameters or {}).get("rope_theta")
    return {} if base is not None else without_positions(raw)


class HfKimiDelta(Struct, frozen=True, kw_only=True):
    """linear_attn_config of Kimi Linear. Layers are counted from 1."""

    full_attn_layers: list[int] | None = None
    kda_layers: list[int] | None = None
    head_dim: sizes.Width | None = None
    num_heads: sizes.Heads | None = None
    short_conv_kernel_size: Kernel | None = None


class HfKimiLinear(Struct, frozen=True, kw_only=True):
    """Keys of Kimi Linear, in checkpoints and as transformers writes them."""

    num_hidden_layers: sizes.Layers
    rms_norm_eps: Eps = 1e-5
    layer_types: list[str] | None = None
    linear_attn_config: HfKimiDelta | None = None
    linear_head_dim: sizes.Width = 128
    linear_num_heads: sizes.Heads = 32
    linear_conv_kernel_dim: Kernel = 4
    moe_router_activation_func: str = "sigmoid"
    mla_use_nope: bool = True

    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers. Raises ModelError."""
        own, count = self.linear_attn_config or HfKimiDelta(), self.num_hidden_layers
        if own.full_attn_layers is None or own.kda_layers is None:
            names = self.layer_types or [
                "full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)
            ]
            return kinds_of(names, DELTA_KINDS, "layer_types", count)
        if sorted([*own.full_attn_layers, *own.kda_layers]) != list(range(1, count + 1)):
            raise ModelError(
                "config.json: full_attn_layers and kda_layers of linear_attn_config must name each of the "
                f"{count} layers once, from 1 on"
            )
        return tuple("attention" if i + 1 in own.full_attn_layers else "recurrent" for i in range(count))


def kimi_linear(raw: JsonDict) -> Hybrid:
    """Kimi Linear: Kimi's delta rule, and latent attention without positions in every fourth layer."""
    hf = decoded(raw, HfKimiLinear)
    if hf.moe_router_activation_func != "sigmoid" or not hf.mla_use_nope:
        raise ModelError(
            f"config.json: moe_router_activation_func {hf.moe_router_activation_func} with mla_use_nope "
            f"{hf.mla_use_nope} is not supported; supported is sigmoid with true"
        )
    own = hf.linear_attn_config or HfKimiDelta()
    mixer = KimiDelta(
        num_heads=own.num_heads or hf.linear_num_heads,
        head_dim=own.head_dim or hf.linear_head_dim,
        kernel=own.short_conv_kernel_size or hf.linear_conv_kernel_dim,
        eps=hf.rms_norm_eps,
    )
    return Hybrid(
        Recurrent(kinds=hf.kinds(), mixer=mixer),
        {
            "rms_norm_eps": hf.rms_norm_eps,
            "layer_types": None,
            "rope_interleave": False,
            "head_dim": None,
            "tie_word_embeddings": False,  # whatever config.json says
        },
    )

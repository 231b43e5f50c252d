"""Families whose recurrent layers are mixers of Mamba 2: see hybrid_config.py. Torch-free."""

import math
from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonDict, JsonValue
from runtime.models.config import sizes
from runtime.models.config.families import decoded, granite
from runtime.models.config.hybrid_config import Eps, Hybrid, Kernel, without_attention, without_positions
from runtime.models.config.recurrent_config import LayerKind, Mamba2, Multipliers, Recurrent, kinds_of

NormPlace = Literal["gated", "before_gate", "none"]


def _step_limits(value: JsonValue) -> tuple[float, float]:
    """Bounds of time steps. Python writes infinity in ways that are not JSON: what is no number stands for no
    bound."""
    if not isinstance(value, list) or len(value) != 2:
        return 0.0, math.inf
    low, high = value
    return (
        float(low) if isinstance(low, int | float) else 0.0,
        float(high) if isinstance(high, int | float) else math.inf,
    )


def checked(mixer: Mamba2) -> Mamba2:
    """Raises ModelError where heads cannot share groups."""
    if mixer.num_heads % mixer.num_groups:
        raise ModelError(
            f"config.json: {mixer.num_heads} heads of recurrent layers (mamba_n_heads, mamba_num_heads or "
            f"num_heads) in {mixer.num_groups} groups (n_groups) are not supported; supported are multiples"
        )
    return mixer


class HfMixer(Struct, frozen=True, kw_only=True):
    """Keys of a mixer that Mamba 2 and Nemotron-H have in common."""

    n_groups: sizes.Heads = 8
    conv_kernel: Kernel = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_norm_epsilon: Eps = 1e-5
    time_step_limit: JsonValue = None

    def mixer(self, num_heads: int, head_dim: int, state_dim: int) -> Mamba2:
        """The mixer. Raises ModelError."""
        return checked(
            Mamba2(
                num_heads=num_heads,
                head_dim=head_dim,
                state_dim=state_dim,
                num_groups=self.n_groups,
                kernel=self.conv_kernel,
                has_conv_bias=self.use_conv_bias,
                has_bias=self.use_bias,
                eps=self.layer_norm_epsilon,
                step_limits=_step_limits(self.time_step_limit),
            )
        )


class HfMamba2(HfMixer, frozen=True, kw_only=True):
    """Keys of Mamba 2."""

    hidden_size: sizes.Width
    num_hidden_layers: sizes.Layers
    num_heads: sizes.Heads
    head_dim: sizes.Width
    state_size: sizes.Width


def mamba2(raw: JsonDict) -> Hybrid:
    """Mamba 2: recurrent layers alone, without feed-forwards and without limits of the context."""
    hf = decoded(raw, HfMamba2)
    mixer = hf.mixer(hf.num_heads, hf.head_dim, hf.state_size)
    return without_attention(mixer, hf.num_hidden_layers, hf.num_heads, hf.layer_norm_epsilon)


class HfMambaLayers(Struct, frozen=True, kw_only=True):
    """Keys of layers of Mamba 2 among others: Bamba, Falcon-H1, Granite 4."""

    hidden_size: sizes.Width
    num_hidden_layers: sizes.Layers
    mamba_n_heads: sizes.Heads = 128
    mamba_d_head: sizes.Width | str | None = "auto"
    mamba_n_groups: sizes.Heads = 1
    mamba_d_state: sizes.Width = 256
    mamba_d_conv: Kernel = 4
    mamba_d_ssm: sizes.Width | None = None  # None: mamba_expand * hidden_size
    mamba_expand: A[int, Meta(ge=1, le=64)] = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_rms_norm: bool | None = None
    mamba_norm_before_gate: bool = True
    rms_norm_eps: Eps = 1e-5
    time_step_limit: JsonValue = None

    def mixer(self, multipliers: tuple[float, ...] = ()) -> Mamba2:
        """The mixer. Raises ModelError."""
        inner = self.mamba_d_ssm or self.mamba_expand * self.hidden_size
        dim = self.mamba_d_head
        norm: NormPlace = "before_gate" if self.mamba_norm_before_gate else "gated"
        if self.mamba_rms_norm is None:  # only Falcon-H1 has a choice
            norm = "gated"
        elif not self.mamba_rms_norm:
            norm = "none"
        return checked(
            Mamba2(
                num_heads=self.mamba_n_heads,
                head_dim=dim if isinstance(dim, int) else max(1, inner // self.mamba_n_heads),
                state_dim=self.mamba_d_state,
                num_groups=self.mamba_n_groups,
                kernel=self.mamba_d_conv,
                has_conv_bias=self.mamba_conv_bias,
                has_bias=self.mamba_proj_bias,
                norm=norm,
                eps=self.rms_norm_eps,
                step_limits=_step_limits(self.time_step_limit),
                multipliers=multipliers,
            )
        )


class HfBamba(HfMambaLayers, frozen=True, kw_only=True):
    """Keys of Bamba."""

    attn_layer_indices: list[int] | None = None
    rope_parameters: JsonDict | None = None


def bamba(raw: JsonDict) -> Hybrid:
    """Bamba: layers of Mamba 2 with feed-forwards, and attention in some of them."""
    hf = decoded(raw, HfBamba)
    attends = hf.attn_layer_indices or []
    kinds: tuple[LayerKind, ...] = tuple(
        "attention" if i in attends else "recurrent" for i in range(hf.num_hidden_layers)
    )
    # half of each head is rotated, whether config.json says so or not
    keys: JsonDict = {"partial_rotary_factor": 0.5, "rms_norm_eps": hf.rms_norm_eps}
    if hf.rope_parameters is not None:
        keys["rope_parameters"] = {"partial_rotary_factor": 0.5, **hf.rope_parameters}
    return Hybrid(Recurrent(kinds=kinds, mixer=hf.mixer()), keys)


class HfFalconH1(HfMambaLayers, frozen=True, kw_only=True):
    """Keys of Falcon-H1."""

    num_attention_heads: sizes.Heads
    head_dim: sizes.Width | None = None
    mamba_d_ssm: sizes.Width | None = 1024
    mamba_rms_norm: bool | None = False
    projectors_bias: bool = False
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: A[list[float], Meta(min_length=5, max_length=5)] | None = None
    mlp_multipliers: A[list[float], Meta(min_length=2, max_length=2)] | None = None


def falcon_h1(raw: JsonDict) -> Hybrid:
    """Falcon-H1: Mamba 2 and attention side by side in every layer, with multipliers everywhere."""
    hf = decoded(raw, HfFalconH1)
    if hf.projectors_bias != hf.mamba_proj_bias:
        raise ModelError(
            f"config.json: projectors_bias {hf.projectors_bias} with mamba_proj_bias {hf.mamba_proj_bias} is "
            "not supported; supported is the same value for both"
        )
    gate, down = hf.mlp_multipliers or (1.0, 1.0)
    multipliers = Multipliers(
        mixer_in=hf.ssm_in_multiplier,
        mixer_out=hf.ssm_out_multiplier,
        attention_in=hf.attention_in_multiplier,
        attention_out=hf.attention_out_multiplier,
        gate=gate,
        feed_forward_out=down,
    )
    kind: LayerKind = "parallel"
    return Hybrid(
        Recurrent(
            kinds=(kind,) * hf.num_hidden_layers,
            mixer=hf.mixer(tuple(hf.ssm_multipliers or ())),
            multipliers=multipliers,
        ),
        {"rms_norm_eps": hf.rms_norm_eps},
    )


def falcon_h1_factors(raw: Fields) -> Fields:
    """Factors outside the layers. That of the keys is one on the scores."""
    hf = decoded(raw, HfFalconH1)
    dim = hf.head_dim or max(1, hf.hidden_size // hf.num_attention_heads)
    return {
        "embed_scale": hf.embedding_multiplier,
        "logit_scale": hf.lm_head_multiplier,
        "score_factor": hf.key_multiplier * dim**-0.5,
    }


class HfGraniteHybrid(HfMambaLayers, frozen=True, kw_only=True):
    """Keys of Granite 4."""

    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    num_local_experts: A[int, Meta(ge=0, le=2**16)] = 8
    shared_intermediate_size: sizes.Width = 1024
    rms_norm_eps: Eps = 1e-6


LAYER_NAMES: dict[str, LayerKind] = {
    "attention": "attention",
    "full_attention": "attention",
    "mamba": "recurrent",
    "linear_attention": "recurrent",
}


def granite_hybrid(raw: JsonDict) -> Hybrid:
    """Granite 4: layers of Mamba 2 or attention, each with a feed-forward: experts and a shared one, or the
    shared one alone."""
    hf = decoded(raw, HfGraniteHybrid)
    names = hf.layer_types or hf.layers_block_type or ["mamba"] * hf.num_hidden_layers
    kinds = kinds_of(names, LAYER_NAMES, "layer_types", hf.num_hidden_layers)
    keys: JsonDict = {"rms_norm_eps": hf.rms_norm_eps, "layer_types": None}
    if not hf.num_local_experts:
        keys |= {"num_local_experts": None, "intermediate_size": hf.shared_intermediate_size}
    return Hybrid(Recurrent(kinds=kinds, mixer=hf.mixer()), keys)


def granite_hybrid_fields(raw: Fields) -> Fields:
    """Multipliers; no positions, unless config.json asks for rotary ones."""
    hf = decoded(raw, HfGraniteLayers)
    if hf.position_embedding_type == "rope":
        return granite(raw)
    return granite(raw) | without_positions(raw)


class HfGraniteLayers(Struct, frozen=True, kw_only=True):
    """Keys of Granite 4 that say whether there are positions."""

    position_embedding_type: str | None = None


class HfNemotronH(HfMixer, frozen=True, kw_only=True):
    """Keys of Nemotron-H. Layers are named one by one, or by a letter each."""

    layers_block_type: A[list[str], Meta(min_length=1, max_length=4096)] | None = None
    hybrid_override_pattern: A[str, Meta(min_length=1, max_length=4096)] | None = None
    mtp_layers_block_type: A[list[str], Meta(max_length=64)] | None = None  # of a next-token layer
    mtp_hybrid_override_pattern: A[str, Meta(max_length=64)] | None = None
    mamba_num_heads: sizes.Heads = 128
    mamba_head_dim: sizes.Width = 64
    ssm_state_size: sizes.Width = 128
    attention_head_dim: sizes.Width | None = None  # older name of head_dim
    head_dim: sizes.Width | None = None
    mlp_bias: bool = False


NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(raw: JsonDict) -> Hybrid:
    """Nemotron-H: each layer is a mixer of Mamba 2, attention, a feed-forward or experts."""
    hf = decoded(raw, HfNemotronH)
    names = hf.layers_block_type
    if names is None:
        if hf.hybrid_override_pattern is None:
            raise ModelError(
                "config.json lacks layers_block_type or hybrid_override_pattern; restore the file from the "
                "model's source"
            )
        names = [NEMOTRON_LETTERS.get(letter, letter) for letter in hf.hybrid_override_pattern]
    field = "layers_block_type" if hf.layers_block_type else "hybrid_override_pattern"
    kinds = kinds_of(names, LAYER_NAMES | {"mlp": "none", "moe": "none"}, field, len(names))
    if hf.mlp_bias and "moe" in names:
        raise ModelError("config.json: mlp_bias with experts is not supported")
    mixer = hf.mixer(hf.mamba_num_heads, hf.mamba_head_dim, hf.ssm_state_size)
    return Hybrid(
        Recurrent(kinds=kinds, mixer=mixer, has_feed_forward=False, next_token_kinds=_next_token_kinds(hf)),
        {
            "num_hidden_layers": len(names),
            "rms_norm_eps": hf.layer_norm_epsilon,
            "head_dim": hf.head_dim or hf.attention_head_dim or 128,
            "mlp_layer_types": ["sparse" if name == "moe" else "dense" for name in names],
            "layer_types": None,
            "tie_word_embeddings": False,  # whatever config.json says
        },
    )


def _next_token_kinds(hf: HfNemotronH) -> tuple[LayerKind, ...]:
    """Blocks of a next-token layer: attention, and experts; () for other ones."""
    pattern = hf.mtp_hybrid_override_pattern or ""
    names = hf.mtp_layers_block_type or [NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
    kinds: dict[str, LayerKind] = {"attention": "attention", "full_attention": "attention", "moe": "none"}
    return tuple(kinds[name] for name in names) if set(names) <= kinds.keys() else ()

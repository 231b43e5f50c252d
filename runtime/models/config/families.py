"""What single families have in config.json beyond the keys that all share (HfConfig): each function reads it
into fields of ModelConfig. registry.py names them in the families' rows. Torch-free."""

from collections.abc import Callable
from typing import Annotated as A
from typing import Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config import sizes
from runtime.models.config.block import DraftBlock, PositionScale
from runtime.models.config.rope_config import NO_ROPE, HfRope, Rope, read_rope, rope_of

T = TypeVar("T")
Positive = A[float, Meta(gt=0)]


def decoded(raw: Fields, kind: type[T]) -> T:
    """The part of config.json that `kind` describes. Raises ModelError for values of other types."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ModelError(
            f"config.json cannot be read: {error}; restore the file from the model's source"
        ) from None


class HfGemma(Struct, frozen=True, kw_only=True):
    """Keys of the Gemma families."""

    hidden_size: sizes.Width
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: A[float, Meta(ge=0)] | None = None
    final_logit_softcapping: A[float, Meta(ge=0)] | None = None


def glm4_moe(raw: Fields) -> Fields:
    """Heads of queries and keys are normalized in some models."""
    return {"qk_norm": "head" if raw.get("use_qk_norm") else "none"}


def phi_moe(raw: Fields) -> Fields:
    """The head may have a bias."""
    return {"has_head_bias": bool(raw.get("lm_head_bias"))}


class HfLlama4(Struct, frozen=True, kw_only=True):
    """Keys of Llama 4."""

    num_hidden_layers: sizes.Layers
    use_qk_norm: bool = True
    no_rope_layers: list[int] | None = None  # 1 for a layer with positions
    no_rope_layer_interval: A[int, Meta(gt=0)] = 4
    layer_types: list[str] | None = None
    attention_chunk_size: A[int, Meta(gt=0)] | None = 8192
    attn_temperature_tuning: bool = True
    attn_scale: float = 0.1
    floor_scale: A[float, Meta(gt=0)] = 8192


def llama4(raw: Fields) -> Fields:
    """Layers without positions, which see everything and scale their queries; the others attend within
    chunks, and normalize rotated heads. Raises ModelError for other combinations."""
    hf = decoded(raw, HfLlama4)
    count, rope = hf.num_hidden_layers, read_rope(decoded(raw, HfRope))
    kinds = hf.no_rope_layers or [int((i + 1) % hf.no_rope_layer_interval != 0) for i in range(count)]
    types = ["chunked_attention" if kind else "full_attention" for kind in kinds]
    if len(kinds) != count or hf.layer_types not in (None, types):
        raise ModelError(
            f"config.json: no_rope_layers and layer_types must say the same of each of the {count} layers: "
            "chunked_attention for those with positions"
        )
    scale = PositionScale(beta=hf.attn_scale, interval=hf.floor_scale, offset=1)
    return {
        "layer_ropes": tuple(rope if kind else NO_ROPE for kind in kinds),
        "position_scales": tuple(None if kind or not hf.attn_temperature_tuning else scale for kind in kinds),
        "chunk": hf.attention_chunk_size or 0,
        "qk_norm": "unit" if hf.use_qk_norm else "none",
    }


def _without(key: str) -> Callable[[Fields], Fields]:
    """A reader that refuses a key of which no released model has another value than null or false."""

    def read(raw: Fields) -> Fields:
        if raw.get(key):
            raise ModelError(f"config.json: {key} {raw[key]} is not supported; supported is none")
        return {}

    return read


olmoe = _without("clip_qkv")
ernie_moe = _without("use_bias")


def gemma(raw: Fields) -> Fields:
    """Scaled embeddings; scores with a scale of their own and caps of scores and logits, if there are any."""
    hf = decoded(raw, HfGemma)
    scalar = hf.query_pre_attn_scalar
    return {
        "embed_scale": hf.hidden_size**0.5,
        "score_factor": 0.0 if scalar is None else scalar**-0.5,
        "score_cap": hf.attn_logit_softcapping or 0.0,
        "logit_cap": hf.final_logit_softcapping or 0.0,
    }


class HfLayers(Struct, frozen=True, kw_only=True):
    """Which layers have a sliding window: those that layer_types names, or by a pattern that repeats, as a
    period whose last layer sees everything or as letters L (local) and G (global)."""

    num_hidden_layers: sizes.Layers
    layer_types: list[str] | None = None
    sliding_window: A[int, Meta(ge=0, le=2**31 - 1)] | None = None
    sliding_window_pattern: A[int, Meta(ge=0, le=4096)] | A[str, Meta(min_length=1)] | None = None

    def local_layers(self) -> list[bool]:
        """Whether each layer has the window. Raises ModelError for layer_types that are not supported."""
        count, pattern = self.num_hidden_layers, self.sliding_window_pattern
        if self.layer_types is not None:
            if len(self.layer_types) != count or set(self.layer_types) - {
                "full_attention",
                "sliding_attention",
            }:
                raise ModelError(
                    "config.json: layer_types must name full_attention or sliding_attention for each of the "
                    f"{count} layers"
                )
            return [kind == "sliding_attention" for kind in self.layer_types]
        if isinstance(pattern, str):
            return [pattern[i % len(pattern)] == "L" and i + 1 < count for i in range(count)]
        return [bool(pattern) and (i + 1) % (pattern or 1) != 0 for i in range(count)]

    def windows(self) -> tuple[int, ...]:
        """The sliding window of each layer; 0: none."""
        return tuple((self.sliding_window or 0) if is_local else 0 for is_local in self.local_layers())


def gemma3(raw: Fields) -> Fields:
    """As Gemma, with frequencies of their own in layers that have a window."""
    found = gemma(raw) | two_ropes(raw | {"rope_theta": raw.get("rope_theta", 1e6)})
    # trained to this length with its scaled positions
    return found | {"context_len": found["rope"].max_position_embeddings}


def two_ropes(raw: Fields) -> Fields:
    """Windows by layer, and rotary positions by whether a layer has one. In older files rope_scaling is that
    of the other layers, and rope_local_base_freq the base of those with a window."""
    layers = decoded(raw, HfLayers)
    kinds = raw.get("rope_parameters") or {}
    base = {name: value for name, value in raw.items() if name not in ("rope_parameters", "rope_scaling")}
    theta = raw.get("rope_local_base_freq", raw.get("rope_theta"))
    local = rope_of("sliding_attention", kinds) or ({} if theta is None else {"rope_theta": theta})
    full = rope_of("full_attention", kinds) or raw.get("rope_scaling")
    ropes = [read_rope(decoded(base | {"rope_parameters": values}, HfRope)) for values in (full or {}, local)]
    is_local = layers.local_layers()
    return {
        "windows": layers.windows(),
        "rope": ropes[0],
        "context_len": ropes[0].context_len,
        "layer_ropes": tuple(ropes[one] for one in is_local),
    }


def rope_in_local_layers(raw: Fields) -> Fields:
    """Windows by layer; layers that see everything have no positions, unless no layer has a window."""
    layers = decoded(raw, HfLayers)
    rope, is_local = _rope(raw), layers.local_layers()
    has_window = bool(layers.sliding_window)
    return {
        "windows": layers.windows(),
        "layer_ropes": tuple(rope if one or not has_window else NO_ROPE for one in is_local),
    }


class HfDraftLayers(Struct, frozen=True, kw_only=True):
    """Which next-token layers of K-EXAONE have a window."""

    mtp_layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ("full_attention",)
    mtp_sliding_windows: list[A[int, Meta(ge=0, le=2**31 - 1)] | None] | None = None


def exaone_moe(raw: Fields) -> Fields:
    """As rope_in_local_layers, of next-token layers too. Raises ModelError."""
    found, hf = rope_in_local_layers(raw), decoded(raw, HfDraftLayers)
    kinds, windows = hf.mtp_layer_types, hf.mtp_sliding_windows
    if windows is None:
        windows = [max(found["windows"], default=0) for _ in kinds]
    if len(windows) != len(kinds):
        raise ModelError(
            f"config.json: mtp_sliding_windows has {len(windows)} entries for the {len(kinds)} of "
            "mtp_layer_types"
        )
    wide = DraftBlock(rope=NO_ROPE if any(found["windows"]) else None)
    blocks = [
        DraftBlock(window=window or 0) if kind == "sliding_attention" else wide
        for kind, window in zip(kinds, windows, strict=True)
    ]
    return found | {"draft_blocks": tuple(blocks)}


class HfSmolLM3(Struct, frozen=True, kw_only=True):
    """Keys of SmolLM 3."""

    num_hidden_layers: sizes.Layers
    no_rope_layers: list[int] | None = None  # 1 for layers with positions, 0 for those without
    no_rope_layer_interval: A[int, Meta(gt=0)] = 4


def smollm3(raw: Fields) -> Fields:
    """Every fourth layer has no positions."""
    hf = decoded(raw, HfSmolLM3)
    count, rope = hf.num_hidden_layers, _rope(raw)
    rotates = hf.no_rope_layers or [int((i + 1) % hf.no_rope_layer_interval != 0) for i in range(count)]
    if len(rotates) < count:
        raise ModelError(f"config.json: no_rope_layers must have a number for each of the {count} layers")
    return {"layer_ropes": tuple(rope if one else NO_ROPE for one in rotates[:count])}


class HfCohere(Struct, frozen=True, kw_only=True):
    """Keys of Cohere's models."""

    logit_scale: float | None = 0.0625
    use_qk_norm: bool | None = False


def cohere(raw: Fields) -> Fields:
    """Scaled logits; in large models norms of heads."""
    hf = decoded(raw, HfCohere)
    return {
        "logit_scale": 1.0 if hf.logit_scale is None else hf.logit_scale,
        "qk_norm": "head_layer" if hf.use_qk_norm else "none",
    }


def cohere2(raw: Fields) -> Fields:
    """As Cohere; layers that see everything have no positions."""
    return cohere(raw) | rope_in_local_layers(raw)


class HfGranite(Struct, frozen=True, kw_only=True):
    """Keys of the Granite families."""

    embedding_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0


def granite(raw: Fields) -> Fields:
    """Multipliers."""
    hf = decoded(raw, HfGranite)
    return {
        "embed_scale": hf.embedding_multiplier,
        "logit_scale": 1 / hf.logits_scaling,
        "residual_scale": hf.residual_multiplier,
        "score_factor": hf.attention_multiplier,
    }


class HfMiniCpm3(Struct, frozen=True, kw_only=True):
    """Keys of MiniCPM 3. None: no such multiplier."""

    hidden_size: sizes.Width
    num_hidden_layers: sizes.Layers
    scale_emb: Positive = 12.0
    scale_depth: Positive | None = 1.4
    dim_model_base: sizes.Width | None = 256


def minicpm3(raw: Fields) -> Fields:
    """Multipliers (Tensor Programs, Yang et al., 2022)."""
    hf = decoded(raw, HfMiniCpm3)
    return {
        "embed_scale": hf.scale_emb,
        "residual_scale": 1.0 if hf.scale_depth is None else hf.scale_depth / hf.num_hidden_layers**0.5,
        "logit_scale": 1.0 if hf.dim_model_base is None else hf.dim_model_base / hf.hidden_size,
    }


class HfBeta(Struct, frozen=True):
    """The part of Ministral 3's rope_parameters that is not of rotary positions."""

    llama_4_scaling_beta: float | None = None


class HfMinistral3(Struct, frozen=True, kw_only=True):
    """Keys of Ministral 3."""

    num_hidden_layers: sizes.Layers
    rope_parameters: HfBeta | None = None


def ministral3(raw: Fields) -> Fields:
    """Queries that are scaled by their position."""
    hf = decoded(raw, HfMinistral3)
    beta, rope = (hf.rope_parameters or HfBeta()).llama_4_scaling_beta, _rope(raw)
    if not beta:
        return {}
    interval = rope.original_max_position_embeddings or rope.max_position_embeddings
    scale = decoded({"beta": beta, "interval": interval}, PositionScale)
    return {"position_scales": (scale,) * hf.num_hidden_layers}


def mistral4_keys(raw: Fields) -> Fields:
    """The rotary part of latent attention is rotated whole: that of a head is no part of it."""
    rope = raw.get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    return {"rope_parameters": {name: one for name, one in rope.items() if name != "partial_rotary_factor"}}


class HfSeedOss(Struct, frozen=True, kw_only=True):
    """Keys of Seed-OSS."""

    attention_out_bias: bool = False


def seed_oss(raw: Fields) -> Fields:
    """The output projection of attention has a flag of its own for a bias."""
    return {"o_bias": decoded(raw, HfSeedOss).attention_out_bias}


class HfAlpha(Struct, frozen=True, kw_only=True):
    """Keys of Hunyuan's rope."""

    alpha: A[float, Meta(ge=0)] | None = None
    rope_theta: Positive | None = None


class HfHunyuan(Struct, frozen=True, kw_only=True):
    """Keys of the Hunyuan families."""

    hidden_size: sizes.Width
    num_attention_heads: sizes.Heads
    head_dim: sizes.Width | None = None
    rope_theta: Positive | None = None
    rope_parameters: HfAlpha | None = None
    rope_scaling: HfAlpha | None = None


def hunyuan(raw: Fields) -> Fields:
    """A rope of type dynamic with a fixed alpha is a plain one with a larger base. Raises ModelError."""
    hf = decoded(raw, HfHunyuan)
    own = hf.rope_parameters or hf.rope_scaling or HfAlpha()
    if not own.alpha:
        return {}
    dim = hf.head_dim or hf.hidden_size // hf.num_attention_heads
    if dim <= 2:
        raise ModelError(f"config.json: head_dim {dim} is too small for a rope with alpha")
    theta = (own.rope_theta or hf.rope_theta or 10000.0) * own.alpha ** (dim / (dim - 2))
    rope = _rope(raw | {"rope_scaling": None, "rope_parameters": {"rope_theta": theta}})
    return {"rope": rope, "context_len": rope.context_len}


def _rope(raw: Fields) -> Rope:
    return read_rope(decoded(raw, HfRope))

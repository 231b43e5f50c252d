"""What single families have in config.json beyond the keys that all share (HfConfig): each function reads it
into fields of ModelConfig. registry.py names them in the families' rows. Torch-free."""

from collections.abc import Callable
from typing import Annotated as A
from typing import TypeVar

import msgspec
from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config import sizes

T = TypeVar("T")


def decoded(raw: Fields, kind: type[T]) -> T:
    """The part of config.json that `kind` describes. Raises ModelError for values of other types."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ModelError(
            f"config.json cannot be read: {error}; restore the file from the model's source"
        ) from None


class HfGemma2(Struct, frozen=True, kw_only=True):
    """Keys of Gemma 2."""

    hidden_size: sizes.Width
    query_pre_attn_scalar: A[float, Meta(gt=0)] | None = None
    attn_logit_softcapping: A[float, Meta(ge=0)] | None = None
    final_logit_softcapping: A[float, Meta(ge=0)] | None = None


class HfGranite(Struct, frozen=True, kw_only=True):
    """Keys of Granite."""

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: A[float, Meta(gt=0)] = 1.0
    logits_scaling: A[float, Meta(gt=0)] = 1.0


def granite(raw: Fields) -> Fields:
    """Multipliers of embeddings, scores, residuals and logits."""
    hf = decoded(raw, HfGranite)
    return {
        "embed_scale": hf.embedding_multiplier,
        "residual_scale": hf.residual_multiplier,
        "score_factor": hf.attention_multiplier,
        "logit_scale": 1 / hf.logits_scaling,
    }


def glm4_moe(raw: Fields) -> Fields:
    """Heads of queries and keys are normalized in some models."""
    return {"qk_norm": "head" if raw.get("use_qk_norm") else "none"}


def phi_moe(raw: Fields) -> Fields:
    """The head may have a bias."""
    return {"has_head_bias": bool(raw.get("lm_head_bias"))}


def _without(key: str) -> Callable[[Fields], Fields]:
    """A reader that refuses a key of which no released model has another value than null or false."""

    def read(raw: Fields) -> Fields:
        if raw.get(key):
            raise ModelError(f"config.json: {key} {raw[key]} is not supported; supported is none")
        return {}

    return read


olmoe = _without("clip_qkv")
ernie_moe = _without("use_bias")


def gemma2(raw: Fields) -> Fields:
    """Scaled embeddings, scores with a scale of their own, caps of scores and logits."""
    hf = decoded(raw, HfGemma2)
    scalar = hf.query_pre_attn_scalar
    return {
        "embed_scale": hf.hidden_size**0.5,
        "score_factor": 0.0 if scalar is None else scalar**-0.5,
        "score_cap": hf.attn_logit_softcapping or 0.0,
        "logit_cap": hf.final_logit_softcapping or 0.0,
    }

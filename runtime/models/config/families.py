"""What single families have in config.json beyond the keys that all share (HfConfig): each function reads it
into fields of ModelConfig. registry.py names them in the families' rows. Torch-free."""

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

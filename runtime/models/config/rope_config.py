"""Parameters of rotary positions in config.json. Torch-free; layers/rotary.py says what they do.

transformers writes them in two ways, and both are read: `rope_scaling` next to `rope_theta`, and
`rope_parameters` since version 5.
"""

from typing import Annotated as A

import msgspec
from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields

Count = A[int, Meta(gt=0, le=2**31 - 1)]


class Rope(Struct, frozen=True, kw_only=True):
    """Parameters of rotary positions, by their names in config.json."""

    rope_type: str = "default"
    rope_theta: A[float, Meta(gt=0)] = 10000.0
    factor: A[float, Meta(gt=0)] = 1.0
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: A[float, Meta(gt=0)] = 1.0
    high_freq_factor: A[float, Meta(gt=0)] = 4.0
    original_max_position_embeddings: Count | None = None
    max_position_embeddings: Count = 2048
    # of each pair of dimensions, as GGUF files have them in place of parameters; none: all are 1
    frequency_divisors: tuple[A[float, Meta(gt=0)], ...] = ()

    partial_rotary_factor: A[float, Meta(gt=0, le=1)] = 1.0  # the part of each head that is rotated
    # longrope: what each frequency is divided by, within the original context and beyond it
    short_factor: tuple[A[float, Meta(gt=0)], ...] = ()
    long_factor: tuple[A[float, Meta(gt=0)], ...] = ()

    @property
    def is_long(self) -> bool:
        """Whether the context is longer than the one that the model was first trained for."""
        longest = self.max_position_embeddings
        return longest > (self.original_max_position_embeddings or longest)

    @property
    def context_len(self) -> int:
        """Tokens of prompt and output together. Scaled variants reach further than max_position_embeddings,
        except llama3, whose max_position_embeddings is the scaled length."""
        longest = self.max_position_embeddings
        if self.rope_type in ("linear", "dynamic"):
            return int(longest * max(self.factor, 1.0))
        if self.rope_type == "yarn":
            return max(longest, int((self.original_max_position_embeddings or longest) * self.factor))
        return longest


# rope type -> the parameters it cannot do without
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
OLD_ROPE_TYPES = {"su": "longrope"}
NO_ROPE = Rope(rope_type="none")  # of layers without positions


# parameters of Phi-MoE's longrope: the factor on cosines and sines by the factors that are taken
MSCALES = {True: "long_mscale", False: "short_mscale"}


class HfRope(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here."""

    rope_theta: A[float, Meta(gt=0)] = 10000.0
    partial_rotary_factor: float | None = None
    rotary_dim: Count | None = None  # in place of partial_rotary_factor, with head_dim
    head_dim: Count | None = None
    rope_scaling: Fields | None = None
    rope_parameters: Fields | None = None
    max_position_embeddings: Count | None = None
    original_max_position_embeddings: Count | None = None


def read_rope(hf: HfRope) -> Rope:
    """Raises ModelError for a rope type or parameters that are not supported."""
    own = hf.rope_parameters or {}
    own = own.get("full_attention", own)  # some families have other parameters in layers with a window
    values: Fields = {"rope_theta": hf.rope_theta} | own | (hf.rope_scaling or {})
    values.setdefault("partial_rotary_factor", hf.partial_rotary_factor)
    if values["partial_rotary_factor"] is None and hf.rotary_dim is not None and hf.head_dim is not None:
        values["partial_rotary_factor"] = hf.rotary_dim / hf.head_dim
    kind = values.get("rope_type") or values.get("type") or "default"
    kind = OLD_ROPE_TYPES.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise ModelError(
            f"config.json: rope type {kind} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    missing = [name for name in ROPE_TYPES[kind] if values.get(name) is None]
    if missing:
        raise ModelError(f"config.json: rope type {kind} needs {', '.join(missing)}")
    values["rope_type"] = kind
    values["max_position_embeddings"] = longest = hf.max_position_embeddings or 2048
    original = (
        hf.original_max_position_embeddings or values.get("original_max_position_embeddings") or longest
    )
    values["original_max_position_embeddings"] = original
    if kind in ("yarn", "longrope") and values.get("factor") is None:
        values["factor"] = longest / original
    if kind == "longrope" and values.get(mscale := MSCALES[longest > original]) is not None:
        values["attention_factor"] = values[mscale]
    known = {name: values[name] for name in Rope.__struct_fields__ if values.get(name) is not None}
    try:
        return msgspec.convert(known, Rope)
    except msgspec.ValidationError as error:
        raise ModelError(f"config.json: rope parameters: {error}") from None

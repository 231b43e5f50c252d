"""Parameters of rotary positions in config.json. Torch-free; layers/rotary.py says what they do.

transformers writes them in two ways, and both are read: `rope_scaling` next to `rope_theta`, and
`rope_parameters` since version 5.
"""

from typing import Annotated as A
from typing import TypeVar

import msgspec
from msgspec import Meta, Struct, structs

from runtime.errors import ModelError
from runtime.json_value import Fields

T = TypeVar("T")
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

    # of M-RoPE: pairs of dimensions that rotate with the frame, the row and the column of a token in a grid
    mrope_section: tuple[A[int, Meta(ge=0)], ...] = ()
    mrope_interleaved: bool = False  # these pairs take turns, and do not stand together

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


class HfFactors(Struct, frozen=True, kw_only=True):
    """Factors on cosines and sines that Phi-MoE's longrope has in place of attention_factor."""

    long_mscale: float | None = None
    short_mscale: float | None = None


def rope_of(kind: str, given: Fields) -> Fields:
    """The parameters of layers of a kind, of families that have others for each; {}: there are none. Raises
    ModelError."""
    found = given.get(kind)
    if found is not None and not isinstance(found, dict):
        raise ModelError(f"config.json: rope_parameters must have an object as {kind}, not {found!r}")
    return found or {}


def read_rope(hf: HfRope) -> Rope:
    """Raises ModelError for a rope type or parameters that are not supported."""
    own = hf.rope_parameters or {}
    values: Fields = {"rope_theta": hf.rope_theta} | (rope_of("full_attention", own) or own)
    values |= hf.rope_scaling or {}
    kind = values.get("rope_type") or values.get("type") or "default"
    kind = OLD_ROPE_TYPES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ModelError(
            f"config.json: rope_type {kind} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    missing = [name for name in ROPE_TYPES[kind] if values.get(name) is None]
    if missing:
        raise ModelError(f"config.json: rope_type {kind} needs {', '.join(missing)}")
    partial = hf.partial_rotary_factor
    if partial is None and hf.rotary_dim is not None and hf.head_dim is not None:
        partial = hf.rotary_dim / hf.head_dim
    derived: Fields = {"rope_type": kind, "max_position_embeddings": hf.max_position_embeddings or 2048}
    if values.get("partial_rotary_factor") is None and partial is not None:
        derived["partial_rotary_factor"] = partial
    rope = _converted(values | derived, Rope)
    longest = rope.max_position_embeddings
    original = hf.original_max_position_embeddings or rope.original_max_position_embeddings or longest
    rope = structs.replace(rope, original_max_position_embeddings=original)
    if kind in ("yarn", "longrope") and values.get("factor") is None:
        rope = structs.replace(rope, factor=longest / original)
    if kind == "longrope":
        factors = _converted(values, HfFactors)
        factor = factors.long_mscale if longest > original else factors.short_mscale
        rope = rope if factor is None else structs.replace(rope, attention_factor=factor)
    return rope


def _converted(values: Fields, kind: type[T]) -> T:
    """The parameters that `kind` has; null is as good as none. Raises ModelError."""
    try:
        return msgspec.convert({name: value for name, value in values.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"config.json: rope_parameters or rope_scaling: {error}") from None

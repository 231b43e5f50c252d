"""The keys of config.json and generation_config.json that decoders share, by the names of transformers, and
checks of them. Torch-free."""

from typing import Annotated as A

from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import JsonDict
from runtime.models.config import sizes
from runtime.models.config.config_files import in_the_files_words
from runtime.models.config.family import Family

Ids = int | list[int] | None
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class HfConfig(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here. Everything else in the file is ignored."""

    architectures: list[str] | None = None
    vocab_size: sizes.Tokens
    hidden_size: sizes.Width
    intermediate_size: sizes.Width
    num_hidden_layers: sizes.Layers
    num_attention_heads: sizes.Heads
    num_key_value_heads: sizes.Heads | None = None
    head_dim: sizes.Width | None = None
    num_nextn_predict_layers: A[int, Meta(ge=0, le=4096)] | None = None
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    use_bidirectional_attention: bool | None = None
    rms_norm_eps: A[float, Meta(ge=0)] = 1e-6
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    qkv_bias: bool = True  # read for families that may have one
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: A[int, Meta(ge=0, le=2**31 - 1)] | None = 4096
    max_window_layers: A[int, Meta(ge=0)] = 28
    layer_types: list[str] | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    bos_token_id: Ids = None
    eos_token_id: Ids = None
    quantization_config: JsonDict | None = None
    compression_config: JsonDict | None = None  # older name that compressed-tensors wrote

    @property
    def stored_quantization(self) -> JsonDict | None:
        """How the checkpoint is quantized, by either name; None: it is not."""
        return self.quantization_config or self.compression_config


class HfGeneration(Struct, frozen=True, kw_only=True):
    """The part of generation_config.json that is read here."""

    eos_token_id: Ids = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def sampling(self) -> dict[str, float]:
        """Those of SAMPLING_KEYS that the file has."""
        given = {key: getattr(self, key) for key in SAMPLING_KEYS}
        return {key: value for key, value in given.items() if value is not None}


class HfArchitectures(Struct, frozen=True):
    """The part of config.json that decides how the rest is read."""

    architectures: list[str] | None = None


def token_ids(value: Ids) -> list[int]:
    """One id or several as a list."""
    return [] if value is None else [value] if isinstance(value, int) else value


def with_known_keys(raw: JsonDict, family: Family) -> JsonDict:
    """config.json of a family with the keys that are read here. Raises ModelError where layers differ in
    intermediate_size."""
    raw = family.defaults | raw
    inner = raw.get("intermediate_size")
    if isinstance(inner, list) and inner:
        if any(size != inner[0] for size in inner):
            raise ModelError("config.json: intermediate_size differs between layers, which is not supported")
        raw = raw | {"intermediate_size": inner[0]}
    names = [(theirs, ours) for theirs, ours in family.keys if theirs in raw]
    raw = raw | {ours: raw[theirs] for theirs, ours in names}
    try:
        return raw if family.prepare is None else raw | family.prepare(raw)
    except ModelError as error:
        raise type(error)(in_the_files_words(str(error), names)) from None


def check_sizes(family: Family, hf: HfConfig) -> None:
    """Raises ModelError for an activation or sizes that are not supported."""
    activation = hf.hidden_act if family.activation == "silu" else hf.hidden_activation or family.activation
    if activation != family.activation:
        name = "hidden_act" if family.activation == "silu" else "hidden_activation"
        raise ModelError(
            f"config.json: {name} {activation} is not supported; supported is {family.activation}"
        )
    if hf.head_dim is None and hf.hidden_size % hf.num_attention_heads:
        raise ModelError(
            f"config.json: hidden_size {hf.hidden_size} is not a multiple of num_attention_heads "
            f"{hf.num_attention_heads}, "
            "and there is no head_dim"
        )


def windows(family: Family, hf: HfConfig) -> tuple[int, ...]:
    """The sliding window of each layer; 0: none. Raises ModelError for layer_types that are not
    supported."""
    window, num_layers = hf.sliding_window or 0, hf.num_hidden_layers
    if family.window == "all":
        return (window,) * num_layers
    if family.window == "none" or (
        family.window not in ("alternating", "named") and not hf.use_sliding_window
    ):
        return (0,) * num_layers
    if family.window == "all_if_enabled":
        return (window,) * num_layers
    if family.window == "named" and hf.layer_types is None:
        return (0,) * num_layers
    if family.window == "layer_types" and hf.layer_types is None:
        raise ModelError("config.json: use_sliding_window needs layer_types in this family")
    types = hf.layer_types or [
        "full_attention"
        if (i % 2 if family.window == "alternating" else i < hf.max_window_layers)
        else "sliding_attention"
        for i in range(num_layers)
    ]
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if len(types) != num_layers or unknown:
        raise ModelError(
            "config.json: layer_types must name full_attention or sliding_attention for each of the "
            f"{num_layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)

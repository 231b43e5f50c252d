"""config.json of encoders: the BERT line and ModernBERT. Torch-free; model_config.py calls it."""

from typing import Annotated as A

import msgspec
from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonDict
from runtime.models.config import sizes
from runtime.models.config.config_files import decode, in_the_files_words
from runtime.models.config.rope_config import Rope
from runtime.models.config.tasks import family_of

ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
DISTIL = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
# activation between the two layers of a classifier's head, by family; tanh where none is named
HEADS = {"DistilBert": "relu"}
MODERN = {"hidden_activation": "hidden_act", "norm_eps": "layer_norm_eps"}
OWN_NAMES = {
    "DistilBert": DISTIL,
    "ModernBert": MODERN,
}  # names of fields that a family has in place of BERT's
ENCODERS = ("Bert", "Roberta", "XLMRoberta", "DistilBert", "ModernBert")


class RotaryEncoder(Struct, frozen=True, kw_only=True):
    """An encoder with rotary positions in place of a table (ModernBERT)."""

    windows: tuple[int, ...]  # tokens that each layer sees on both sides of a token; 0: all
    global_theta: float  # base of rotary positions in layers that see all tokens
    local_theta: float  # and in layers with a window
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    head_bias: bool  # of a classifier's first layer


class Encoder(Struct, frozen=True, kw_only=True):
    """The part of ModelConfig that only encoders have."""

    num_positions: int  # rows of the table of positions
    first_position: int  # position of a text's first token
    num_types: int  # token types (segments); 0: the model has none
    activation: str  # gelu, gelu_tanh, relu, silu
    head_activation: str  # tanh, relu, gelu, gelu_tanh, silu
    rotary: RotaryEncoder | None = None  # None: learned absolute positions


class HfEncoder(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here, by BERT's names."""

    vocab_size: sizes.Tokens
    hidden_size: sizes.Width
    intermediate_size: sizes.Width
    num_hidden_layers: sizes.Layers
    num_attention_heads: sizes.Heads
    max_position_embeddings: sizes.Tokens
    type_vocab_size: A[int, Meta(ge=0, le=2**16)] = 0
    hidden_act: str = "gelu"
    layer_norm_eps: A[float, Meta(ge=0)] = 1e-12
    pad_token_id: int | None = 0
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None


def read_encoder(architecture: str, raw: bytes) -> tuple[HfEncoder, Encoder]:
    """Raises ModelError for an encoder that is not supported."""
    names = OWN_NAMES.get(family_of(architecture), {})
    fields = {names.get(key, key): value for key, value in decode(raw, JsonDict, "config.json").items()}
    try:
        return _read(architecture, decode(msgspec.json.encode(fields), HfEncoder, "config.json"), fields)
    except ModelError as error:
        raise ModelError(in_the_files_words(str(error), names.items())) from None


def _read(architecture: str, hf: HfEncoder, fields: JsonDict) -> tuple[HfEncoder, Encoder]:
    if hf.hidden_act not in ACTIVATIONS:
        raise ModelError(
            f"config.json: hidden_act {hf.hidden_act} is not supported; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    if hf.position_embedding_type != "absolute" or hf.is_decoder:
        raise ModelError(
            "config.json: only encoders with absolute positions are supported (position_embedding_type, "
            "is_decoder)"
        )
    if hf.hidden_size % hf.num_attention_heads:
        raise ModelError(
            f"config.json: hidden_size {hf.hidden_size} is not a multiple of num_attention_heads "
            f"{hf.num_attention_heads}"
        )
    if family_of(architecture) == "ModernBert":
        return hf, _read_modern(hf, fields)
    first = (hf.pad_token_id or 0) + 1 if family_of(architecture) in ("Roberta", "XLMRoberta") else 0
    return hf, Encoder(
        num_positions=hf.max_position_embeddings,
        first_position=first,
        num_types=hf.type_vocab_size,
        activation=ACTIVATIONS[hf.hidden_act],
        head_activation=HEADS.get(family_of(architecture), "tanh"),
    )


class HfTheta(Struct, frozen=True, kw_only=True):
    """Rotary positions of ModernBERT's layers of one kind."""

    rope_type: str = "default"
    rope_theta: A[float, Meta(gt=0)] | None = None


class HfThetas(Struct, frozen=True):
    """Rotary positions by kind of layer."""

    full_attention: HfTheta = HfTheta()
    sliding_attention: HfTheta = HfTheta()


def encoder_fields(hf: HfEncoder) -> Fields:
    """Fields of ModelConfig that encoders share with decoders."""
    return {
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": hf.intermediate_size,
        "num_layers": hf.num_hidden_layers,
        "num_heads": hf.num_attention_heads,
        "num_kv_heads": hf.num_attention_heads,
        "head_dim": hf.hidden_size // hf.num_attention_heads,
        "rms_norm_eps": hf.layer_norm_eps,
        "is_tied": True,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "windows": (0,) * hf.num_hidden_layers,
        "moe": None,
        "mla": None,
        "draft_layers": 0,
        "rope": Rope(),
        "dtype": (hf.dtype or hf.torch_dtype or "").removeprefix("torch.") or None,
        "bos_id": None,
        "eos_ids": (),
        "sampling_defaults": {},
    }


class HfModernBert(Struct, frozen=True, kw_only=True):
    """The part of ModernBERT's config.json that BERT's has not. Later versions write rope_parameters and
    layer_types, earlier ones the numbers that these follow from."""

    local_attention: A[int, Meta(ge=2, le=2**22)] = 128
    global_attn_every_n_layers: A[int, Meta(gt=0, le=4096)] = 3
    layer_types: list[str] | None = None
    rope_parameters: HfThetas | None = None
    global_rope_theta: A[float, Meta(gt=0)] = 160000.0
    local_rope_theta: A[float, Meta(gt=0)] | None = 10000.0
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    classifier_activation: str = "gelu"


def _read_modern(hf: HfEncoder, fields: JsonDict) -> Encoder:
    """Raises ModelError for rotary positions or an activation that are not supported."""
    try:
        modern = msgspec.convert(fields, HfModernBert)
    except msgspec.ValidationError as error:
        raise ModelError(f"config.json cannot be read: {error}") from None
    given = modern.rope_parameters or HfThetas()
    ropes = (given.full_attention, given.sliding_attention)
    for rope in ropes:
        if rope.rope_type != "default":
            raise ModelError(f"config.json: rope_type {rope.rope_type} is not supported in an encoder")
    if modern.classifier_activation not in ACTIVATIONS:
        raise ModelError(
            f"config.json: classifier_activation {modern.classifier_activation} is not supported; supported "
            f"are {', '.join(ACTIVATIONS)}"
        )
    thetas = (modern.global_rope_theta, modern.local_rope_theta or modern.global_rope_theta)
    global_theta, local_theta = (rope.rope_theta or theta for rope, theta in zip(ropes, thetas, strict=True))
    every, half = modern.global_attn_every_n_layers, modern.local_attention // 2
    types = modern.layer_types or [
        "sliding_attention" if i % every else "full_attention" for i in range(hf.num_hidden_layers)
    ]
    if len(types) != hf.num_hidden_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise ModelError(
            "config.json: layer_types must name full_attention or sliding_attention for each of the "
            f"{hf.num_hidden_layers} layers"
        )
    return Encoder(
        num_positions=hf.max_position_embeddings,
        first_position=0,
        num_types=0,
        activation=ACTIVATIONS[hf.hidden_act],
        head_activation=ACTIVATIONS[modern.classifier_activation],
        rotary=RotaryEncoder(
            windows=tuple(half if kind == "sliding_attention" else 0 for kind in types),
            global_theta=global_theta,
            local_theta=local_theta,
            norm_bias=modern.norm_bias,
            attention_bias=modern.attention_bias,
            mlp_bias=modern.mlp_bias,
            head_bias=modern.classifier_bias,
        ),
    )

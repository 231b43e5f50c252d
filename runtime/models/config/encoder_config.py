"""config.json of the BERT line of encoders. Torch-free; model_config.py calls it."""

from typing import Annotated as A
from typing import Literal

import msgspec
from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import JsonDict
from runtime.models.config import sizes
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
HEADS: dict[str, Literal["tanh", "relu"]] = {"DistilBert": "relu"}
ENCODERS = ("Bert", "Roberta", "XLMRoberta", "DistilBert")


class Encoder(Struct, frozen=True, kw_only=True):
    """The part of ModelConfig that only encoders have."""

    num_positions: int  # rows of the table of positions
    first_position: int  # position of a text's first token
    num_types: int  # token types (segments); 0: the model has none
    activation: str  # gelu, gelu_tanh, relu, silu
    head_activation: Literal["tanh", "relu"]


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
    try:
        fields = msgspec.json.decode(raw, type=JsonDict)
        if family_of(architecture) == "DistilBert":
            fields = {DISTIL.get(name, name): value for name, value in fields.items()}
        hf = msgspec.convert(fields, HfEncoder)
    except msgspec.MsgspecError as error:
        raise ModelError(
            f"config.json cannot be read: {error}; restore the file from the model's source"
        ) from None
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
    first = (hf.pad_token_id or 0) + 1 if family_of(architecture) in ("Roberta", "XLMRoberta") else 0
    return hf, Encoder(
        num_positions=hf.max_position_embeddings,
        first_position=first,
        num_types=hf.type_vocab_size,
        activation=ACTIVATIONS[hf.hidden_act],
        head_activation=HEADS.get(family_of(architecture), "tanh"),
    )

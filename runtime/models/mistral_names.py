"""Checkpoints as Mistral AI publishes them (consolidated.safetensors, params.json): the names of their
tensors, and the order of rows of queries and keys.

Rotary positions turn pairs of numbers of a head. These files have the two of a pair next to each other; the
Hugging Face layout has the first ones of all pairs, then the second ones.
"""

import re

import torch
from torch import Tensor

from runtime.errors import ModelError
from runtime.layers.weight import Index, TensorReader
from runtime.models.config.model_config import ModelConfig

OUTER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
NAME = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.weight")


class PairedRows:
    """A TensorReader of the rows of heads, in the order of the Hugging Face layout."""

    def __init__(self, reader: TensorReader, num_heads: int, name: str) -> None:
        """Raises ModelError for rows that are no heads."""
        self._reader = reader
        num_rows = reader.get_shape()[0]
        if num_rows % (2 * num_heads):
            raise ModelError(f"{name} has {num_rows} rows, not as many for each of {num_heads} heads")
        self._size = num_rows // num_heads  # of a head
        self._places = torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        return self._reader.get_shape()

    def get_dtype(self) -> str:
        """The dtype by safetensors' name."""
        return self._reader.get_dtype()

    def __getitem__(self, index: Index) -> Tensor:
        """Reads the heads that have these rows."""
        rows, *rest = index if isinstance(index, tuple) else (index,)
        rows = slice(None) if rows is Ellipsis else rows
        assert isinstance(rows, slice), "rows of heads are read by ranges"
        first, last, _ = rows.indices(len(self._places))
        begin = first // self._size * self._size
        end = -(-last // self._size) * self._size
        heads = self._reader[(slice(begin, end), *rest)]
        return heads.index_select(0, self._places[first:last] - begin)


def mistral_tensor(
    name: str, file: str, reader: TensorReader, config: ModelConfig
) -> tuple[str, str, TensorReader]:
    """A tensor as the Hugging Face layout has it: name, file and reader. Names that are not known stay.
    Raises ModelError."""
    found = NAME.fullmatch(name)
    if found is None:
        return name, file, reader
    layer, module = found[1], found[2]
    known = OUTER.get(module) if layer is None else LAYER.get(module)
    if known is None:
        return name, file, reader
    heads = {"attention.wq": config.num_heads, "attention.wk": config.num_kv_heads}.get(module)
    if heads is not None:
        reader = PairedRows(reader, heads, name)
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{known}.weight", file, reader

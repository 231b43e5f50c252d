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
from runtime.models.config.pixtral_config import PixtralEncoder

OUTER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "gate": "mlp.gate",
    "feed_forward.gate": "mlp.gate",
    "shared_experts.w1": "mlp.shared_experts.gate_proj",
    "shared_experts.w2": "mlp.shared_experts.down_proj",
    "shared_experts.w3": "mlp.shared_experts.up_proj",
}
OF_IMAGES = {
    "vision_encoder.patch_conv": "vision_tower.patch_conv",
    "vision_encoder.ln_pre": "vision_tower.ln_pre",
    "vision_language_adapter.w_in": "multi_modal_projector.linear_1",
    "vision_language_adapter.w_out": "multi_modal_projector.linear_2",
    "pre_mm_projector_norm": "multi_modal_projector.norm",
    "patch_merger.merging_layer": "multi_modal_projector.patch_merger.merging_layer",
}
TOWER_LAYER = {
    "attention_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
    "attention.wq": "attention.q_proj",
    "attention.wk": "attention.k_proj",
    "attention.wv": "attention.v_proj",
    "attention.wo": "attention.o_proj",
    "feed_forward.w1": "feed_forward.gate_proj",
    "feed_forward.w2": "feed_forward.down_proj",
    "feed_forward.w3": "feed_forward.up_proj",
}
IN_TOWER = re.compile(r"vision_encoder\.transformer\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"(?:feed_forward\.)?experts\.(\d+)\.(w[123])")
EXPERT_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
LEAVES = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
ROW_LEAVES = ("weight", "weight_packed", "weight_scale")  # tensors that may have a row for each output
NAME = re.compile(r"(?:layers\.(\d+)\.)?(.+)\.([a-z_]+)")


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
        octets = heads.view(torch.uint8) if heads.dtype.itemsize == 1 else heads  # float8 has few operators
        return octets.index_select(0, self._places[first:last] - begin).view(heads.dtype)


def mistral_tensor(
    name: str, file: str, reader: TensorReader, config: ModelConfig
) -> tuple[str, str, TensorReader]:
    """A tensor as the Hugging Face layout has it: name, file and reader. Names that are not known stay.
    Raises ModelError."""
    found = NAME.fullmatch(name)
    if found is None:
        return name, file, reader
    layer, module, leaf = found[1], found[2], found[3]
    if layer is None and isinstance(config.media, PixtralEncoder) and (own := _of_images(module)) is not None:
        if module.endswith(("attention.wq", "attention.wk")):
            reader = PairedRows(reader, config.media.num_heads, name)
        return f"{own}.{leaf}", file, reader
    known = OUTER.get(module) if layer is None else _in_layer(module)
    if known is None:
        return name, file, reader
    heads = {"attention.wq": config.num_heads, "attention.wk": config.num_kv_heads}.get(module)
    has_rows = leaf in ROW_LEAVES and any(size > 1 for size in reader.get_shape()[:1])
    if heads is not None and config.mla is None and has_rows:
        reader = PairedRows(reader, heads, name)
    prefix = "" if layer is None else f"model.layers.{layer}."
    return f"{prefix}{known}.{LEAVES.get(leaf, leaf)}", file, reader


def _of_images(module: str) -> str | None:
    """The name of a module of the vision tower or its projector in the Hugging Face layout; None: it is
    none."""
    if (found := IN_TOWER.fullmatch(module)) is None:
        return OF_IMAGES.get(module)
    inner = TOWER_LAYER.get(found[2])
    return None if inner is None else f"vision_tower.transformer.layers.{found[1]}.{inner}"


def _in_layer(module: str) -> str | None:
    """The name of a layer's module in the Hugging Face layout; None: it is not known."""
    if expert := EXPERT.fullmatch(module):
        return f"mlp.experts.{expert[1]}.{EXPERT_PARTS[expert[2]]}"
    return LAYER.get(module)

"""The encoder of DeepSeek-OCR 2 (DeepSeek-AI, 2026): what SAM's tower makes of an image stands before learned
queries in the layers of a small decoder. Image patches attend to each other there, queries to all of these
and to queries before them, and what queries give is projected.

Every rank has all of its weights.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.devices.base import Device
from runtime.layers.norm import RMSNorm
from runtime.layers.parallel.replicated import (
    ReplicatedEmbedding,
    ReplicatedLinear,
    ReplicatedQkv,
    replicated_weight,
)
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.deepseek_ocr_config import QUERIES, DeepSeekOcrEncoder
from runtime.models.config.renames import Renames
from runtime.models.vision.mlp import GatedMlp
from runtime.models.vision.qwen_vl import rotated
from runtime.models.vision.rotary import axis_angles
from runtime.models.vision.sam import SAM_SHRINKS, Sam, SamDown, channels_first
from runtime.models.vision.slices import Slices, layer_work, through, within


class QueryAttention(Layer):
    """Attention whose key/value heads several query heads share."""

    def __init__(self, device: Device, dtype: torch.dtype, config: DeepSeekOcrEncoder) -> None:
        size = config.hidden_size
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = size // config.num_heads
        kv_size = config.num_kv_heads * self.head_dim
        self.qkv_proj = ReplicatedQkv(device, dtype, size, bias=True, kv_size=kv_size)
        self.o_proj = ReplicatedLinear(device, dtype, size, size, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, L, size]; what is attended to, bool [L, L]; cosines and sines float32 [L, head size / 2] ->
        [B, L, size]."""
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        qkv = self.qkv_proj.forward(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(counts, dim=2)
        parts = (part.transpose(1, 2) for part in (rotated(q, cos, sin), rotated(k, cos, sin), v))
        found = scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
        return self.o_proj.forward(found.transpose(1, 2).flatten(2))


class QueryLayer(Layer):
    """One block of the layers behind SAM's."""

    def __init__(self, device: Device, dtype: torch.dtype, config: DeepSeekOcrEncoder) -> None:
        size = config.hidden_size
        self.input_layernorm = RMSNorm(device, dtype, size, config.eps, may_have_bias=False)
        self.self_attn = QueryAttention(device, dtype, config)
        self.post_attention_layernorm = RMSNorm(device, dtype, size, config.eps, may_have_bias=False)
        self.mlp = GatedMlp(device, dtype, size, config.intermediate_size, config.activation)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As QueryAttention.forward."""
        x = x + self.self_attn.forward(self.input_layernorm.forward(x), mask, cos, sin)
        return x + self.mlp.forward(self.post_attention_layernorm.forward(x))


class DeepSeekOcr(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("vision_tower.sam_encoder.", "sam_model."),
        ("vision_tower.vision_encoder.", "qwen2_model.model.model."),
        ("vision_tower.query_768_resolution.", "media_encoder.query_768."),
        ("vision_tower.query_1024_resolution.", "media_encoder.query_1024."),
        ("qwen2_model.query_", "media_encoder.query_"),
        ("qwen2_model.model.model.norm.", "media_encoder.norm."),
        ("qwen2_model.model.model.", "media_encoder."),
        ("sam_model.blocks.", "sam_model.layers."),
        (".norm1.", ".layer_norm1."),
        (".norm2.", ".layer_norm2."),
        (".mlp.lin", ".lin"),
        ("sam_model.patch_embed.projection.", "sam_model.patch_embed."),
        ("sam_model.patch_embed.proj.", "sam_model.patch_embed."),
        ("sam_model.proj.conv", "media_encoder.down.conv"),
        ("sam_model.net_2.", "media_encoder.down.conv1."),
        ("sam_model.net_3.", "media_encoder.down.conv2."),
        ("sam_model.neck.0.", "sam_model.neck.conv1."),
        ("sam_model.neck.1.", "sam_model.neck.layer_norm1."),
        ("sam_model.neck.2.", "sam_model.neck.conv2."),
        ("sam_model.neck.3.", "sam_model.neck.layer_norm2."),
        ("sam_model.", "media_encoder.sam_model."),
        ("projector.layers.", "multi_modal_projector."),
        ("multi_modal_projector.", "media_encoder.projector."),
        ("view_seperator", "view_separator"),
        ("view_separator", "media_encoder.view_separator"),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: DeepSeekOcrEncoder) -> None:
        size = config.hidden_size
        self.torch_device, self.dtype, self.config = device.torch_device, dtype, config
        self.output_size = config.output_size
        self.sam_model = Sam(device, dtype, config.sam)
        self.down = SamDown(device, dtype, config.sam)
        self.layers = [QueryLayer(device, dtype, config) for _ in range(config.num_layers)]
        self.norm = RMSNorm(device, dtype, size, config.eps, may_have_bias=False)
        self.query_768 = ReplicatedEmbedding(device, dtype, QUERIES["query_768"], size)
        self.query_1024 = ReplicatedEmbedding(device, dtype, QUERIES["query_1024"], size)
        self.projector = ReplicatedLinear(device, dtype, size, config.output_size, bias=True)
        self.view_separator = replicated_weight(device, dtype, config.output_size)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """The rows [num_rows, hidden] of tiles of images, or of whole images behind whose rows a separator
        stands; all have one size, float32 [3, height, width]. The grid has whether they are whole."""
        is_whole = media[0].grid[0] > 1
        pixels = upload(np.concatenate([one.values for one in media]), self.torch_device)
        split = self._part_of_sam(*media[0].shape[1:])
        sam = self.sam_model.slices(pixels.view(len(media), *media[0].shape).to(self.dtype))
        picture, _ = yield from within(sam, 0.0, split)
        patches = self.down.forward(channels_first(picture))
        count = patches.shape[1]
        asked = self.query_768 if count <= QUERIES["query_768"] else self.query_1024
        queries = asked.weight.tensor
        x = torch.cat((patches, queries.expand(len(media), -1, -1)), dim=1)
        places = torch.arange(x.shape[1], device=x.device)
        mask = (places <= places[:, None]) | ((places < count) & (places[:, None] < count))
        angles = axis_angles(places, self.config.hidden_size // self.config.num_heads, self.config.theta)
        layers = through(self.layers, x, mask, angles.cos(), angles.sin())
        x = yield from within(layers, split, 1.0)
        rows = self.projector.forward(self.norm.forward(x[:, count:]))
        if is_whole:
            last = self.view_separator.tensor.expand(len(media), 1, -1)
            rows = torch.cat((rows, last), dim=1)
        return list(rows)

    def _part_of_sam(self, height: int, width: int) -> float:
        """The part of the work that SAM's tower does, for pictures of so many pixels."""
        patch, size = self.sam_model.patch_size, self.config.hidden_size
        sam = sum(self.sam_model.works(height // patch, width // patch))
        count = 2 * (height // patch) * (width // patch) // SAM_SHRINKS  # patches, and as many queries
        return sam / (sam + len(self.layers) * layer_work(count, size, count))

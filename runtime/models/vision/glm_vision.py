"""The encoder of GLM-4.1V and GLM-4.5V (GLM-V Team, 2025): the tower of Qwen2.5-VL without windows and with
learned positions, a convolution that joins neighbouring patches, and a gated feed-forward."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, linear

from runtime.devices.base import Device
from runtime.layers.norm import LayerNorm, RMSNorm
from runtime.layers.parallel.replicated import (
    ReplicatedEmbedding,
    ReplicatedGateUp,
    ReplicatedLinear,
    replicated_weight,
)
from runtime.layers.upload import upload, upload_int64
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.glm_vision_config import GlmVisionEncoder
from runtime.models.config.renames import Renames
from runtime.models.vision.activations import activate
from runtime.models.vision.learned_positions import cubic_taps, table_entries
from runtime.models.vision.qwen_vl import Block, PatchEmbedding, patch_angles, patch_places
from runtime.models.vision.slices import Slices

MERGER_EPS = 1e-5  # of the norm in the merger


class Downsample(Layer):
    """A convolution over squares of patches, whose kernels do not overlap: one product for each square."""

    def __init__(self, device: Device, dtype: torch.dtype, config: GlmVisionEncoder) -> None:
        side, sizes = config.merge_size, (config.output_size, config.hidden_size)
        self.num_patches = side**2
        self.weight = replicated_weight(device, dtype, *sizes, side, side)
        self.bias = replicated_weight(device, dtype, config.output_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size], the patches of a square side by side -> [B, L / patches of a square, text size]."""
        squares = x.unflatten(1, (-1, self.num_patches)).transpose(2, 3).flatten(2)
        return linear(squares, self.weight.tensor.flatten(1), self.bias.tensor)


class GlmMerger(Layer):
    """A projection, a norm and a gated feed-forward of the text model's size."""

    def __init__(self, device: Device, dtype: torch.dtype, config: GlmVisionEncoder) -> None:
        size, inner = config.output_size, config.merger_size
        self.activation = config.activation
        self.proj = ReplicatedLinear(device, dtype, size, size, bias=False)
        self.post_projection_norm = LayerNorm(device, dtype, size, MERGER_EPS)
        self.gate_up_proj = ReplicatedGateUp(device, dtype, size, inner, bias=False)
        self.down_proj = ReplicatedLinear(device, dtype, inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        x = gelu(self.post_projection_norm.forward(self.proj.forward(x)))
        gate, up = self.gate_up_proj.forward(x).chunk(2, dim=-1)
        return self.down_proj.forward(activate(self.activation, gate) * up)


class GlmVision(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("visual.embeddings.position_embedding.", "media_encoder.position_embedding."),
        ("visual.", "media_encoder."),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: GlmVisionEncoder) -> None:
        self.torch_device, self.dtype, self.config = device.torch_device, dtype, config
        self.output_size = config.output_size
        size, eps = config.hidden_size, config.eps
        self.patch_embed = PatchEmbedding(device, dtype, config)
        self.post_conv_layernorm = RMSNorm(device, dtype, size, eps, may_have_bias=False)
        self.position_embedding = ReplicatedEmbedding(device, dtype, config.table_side**2, size)
        self.blocks = [Block(device, dtype, config) for _ in range(config.num_layers)]
        self.post_layernorm = RMSNorm(device, dtype, size, eps, may_have_bias=False)
        self.downsample = Downsample(device, dtype, config)
        self.merger = GlmMerger(device, dtype, config)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """See QwenVl.slices."""
        config, (count, rows, columns) = self.config, media[0].grid
        patches = upload(np.concatenate([one.values for one in media]), self.torch_device)
        x = self.patch_embed.forward(patches.view(-1, *media[0].shape[1:]).to(self.dtype))
        x = self.post_conv_layernorm.forward(x).view(len(media) * count, rows * columns, -1)
        places = patch_places(rows, columns, config.merge_size)
        x = x + self._positions(places, rows, columns)
        cos, sin = patch_angles(
            upload_int64(places.ravel(), self.torch_device).view(-1, 2), config.head_dim // 2
        )
        whole = [torch.arange(len(places), device=self.torch_device).unsqueeze(0)]
        for index, block in enumerate(self.blocks):
            x = block.forward(x, whole, cos, sin)
            yield (index + 1) / len(self.blocks)
        merged = self.merger.forward(self.downsample.forward(self.post_layernorm.forward(x)))
        return list(merged.reshape(len(media), -1, config.output_size))

    def _positions(self, places: np.ndarray, rows: int, columns: int) -> Tensor:
        """Learned positions of patches in these places, [L, size], interpolated in float32."""
        side = self.config.table_side
        entries, weights = table_entries(
            cubic_taps(places[:, 0], rows, side), cubic_taps(places[:, 1], columns, side), side
        )
        indices = upload_int64(entries.ravel(), self.torch_device).view(entries.shape)
        found = embedding(indices, self.position_embedding.weight.tensor).float()
        weighed = found * upload(weights, self.torch_device).view(*entries.shape, 1)
        return weighed.sum(dim=1).to(self.dtype)

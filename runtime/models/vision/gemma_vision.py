"""The encoder of Gemma 3 (Gemma Team, 2025): a SigLIP vision tower (Zhai et al., 2023), of whose patches
squares are averaged, a norm, and a projection.

The tower is that of CLIP with biases of its patches, without a class embedding and a norm before its layers,
and with one behind them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, linear

from runtime.devices.base import Device
from runtime.layers.norm import LayerNorm, UnitOffsetRMSNorm
from runtime.layers.parallel.replicated import ReplicatedEmbedding, replicated_weight
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.gemma_vision_config import Gemma3Encoder
from runtime.models.config.renames import Renames
from runtime.models.vision.clip import ClipLayer, cut_patches
from runtime.models.vision.slices import Slices, through


class SiglipProjection(Layer):
    """A convolution over patches whose kernels do not overlap: one product for each patch."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, patch: int) -> None:
        self.weight = replicated_weight(device, dtype, size, 3, patch, patch)
        self.bias = replicated_weight(device, dtype, size)

    def forward(self, patches: Tensor) -> Tensor:
        """[B, patches, 3 * height * width] -> [B, patches, size]."""
        return linear(patches, self.weight.tensor.flatten(1), self.bias.tensor)


class SiglipEmbeddings(Layer):
    """Patches as vectors, with their positions."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: ClipTower) -> None:
        self.patch_size = tower.patch_size
        self.patch_embedding = SiglipProjection(device, dtype, tower.hidden_size, tower.patch_size)
        self.position_embedding = ReplicatedEmbedding(device, dtype, tower.num_patches, tower.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, height, width] -> [B, patches, size]."""
        return self.patch_embedding.forward(cut_patches(pixels, self.patch_size)) + self.positions()

    def positions(self) -> Tensor:
        """Positions of all patches, [patches, size]."""
        return self.position_embedding.weight.tensor


class SiglipVisionTower(Layer):
    """The tower, without its pooling head."""

    def __init__(
        self, device: Device, dtype: torch.dtype, tower: ClipTower, *, has_last_norm: bool = True
    ) -> None:
        """`has_last_norm`: a norm is behind the layers."""
        self.embeddings = SiglipEmbeddings(device, dtype, tower)
        self.layers = [ClipLayer(device, dtype, tower) for _ in range(tower.num_layers)]
        self.post_layernorm = (
            LayerNorm(device, dtype, tower.hidden_size, tower.eps) if has_last_norm else None
        )

    def slices(self, pixels: Tensor) -> Slices[Tensor]:
        """[B, 3, height, width] -> [B, patches, size]."""
        x = yield from through(self.layers, self.embeddings.forward(pixels))
        return x if self.post_layernorm is None else self.post_layernorm.forward(x)


class PoolingProjector(Layer):
    """From squares of the tower's vectors to embeddings of the text model."""

    def __init__(self, device: Device, dtype: torch.dtype, config: Gemma3Encoder) -> None:
        tower = config.tower
        self.side, self.pooled_side = tower.image_size // tower.patch_size, config.pooled_side
        self.mm_soft_emb_norm = UnitOffsetRMSNorm(device, dtype, tower.hidden_size, tower.eps)
        self.mm_input_projection_weight = replicated_weight(
            device, dtype, tower.hidden_size, config.output_size
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, patches, tower's size] -> [B, rows, text model's size]."""
        squares = x.transpose(1, 2).unflatten(2, (self.side, self.side))
        pooled = avg_pool2d(squares, self.pooled_side).flatten(2).transpose(1, 2)
        normed = self.mm_soft_emb_norm.forward(pooled)
        return torch.matmul(normed, self.mm_input_projection_weight.tensor)


class Gemma3Vision(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("vision_tower.vision_model.", "vision_tower."),
        ("vision_tower.encoder.layers.", "vision_tower.layers."),
        ("vision_tower.", "media_encoder.vision_tower."),
        ("multi_modal_projector.", "media_encoder.multi_modal_projector."),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: Gemma3Encoder) -> None:
        self.torch_device, self.dtype = device.torch_device, dtype
        self.output_size, self.image_size = config.output_size, config.tower.image_size
        self.vision_tower = SiglipVisionTower(device, dtype, config.tower)
        self.multi_modal_projector = PoolingProjector(device, dtype, config)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """The rows [num_rows, hidden] of each image, float32 [3, image_size, image_size]."""
        shape = len(media), 3, self.image_size, self.image_size
        pixels = upload(np.concatenate([one.values for one in media]), self.torch_device)
        x = yield from self.vision_tower.slices(pixels.view(shape).to(self.dtype))
        return list(self.multi_modal_projector.forward(x))

"""The vision tower of CLIP (Radford et al., 2021): a vision transformer with a class embedding, learned
positions and norms before attention and feed-forward.

Every rank has all of its weights and encodes every image.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime.devices.base import Device
from runtime.layers.attention.towers import tower_attention
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import (
    ReplicatedEmbedding,
    ReplicatedLinear,
    ReplicatedQkv,
    replicated_weight,
)
from runtime.layers.weight import Layer, WeightOnly
from runtime.models.config.clip_config import ClipTower
from runtime.models.vision.activations import activate
from runtime.models.vision.slices import Slices, through


def cut_patches(pixels: Tensor, patch: int) -> Tensor:
    """Images [B, 3, height, width] as whole patches, [B, patches, 3 * patch * patch]."""
    count, rows, columns = len(pixels), pixels.shape[2] // patch, pixels.shape[3] // patch
    used = pixels[:, :, : rows * patch, : columns * patch]
    patches = used.reshape(count, 3, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(count, rows * columns, -1)


class ClipEmbeddings(Layer):
    """Patches as vectors behind the class embedding, with their positions."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: ClipTower) -> None:
        size, patch = tower.hidden_size, tower.patch_size
        self.patch_size = patch
        self.class_embedding = replicated_weight(device, dtype, size)
        # a convolution whose kernels do not overlap: one product for each patch
        self.patch_embedding = WeightOnly(replicated_weight(device, dtype, size, 3, patch, patch))
        self.position_embedding = ReplicatedEmbedding(device, dtype, tower.num_patches + 1, size)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, height, width] -> [B, 1 + patches, size]."""
        weight = self.patch_embedding.weight.tensor
        x = linear(cut_patches(pixels, self.patch_size), weight.flatten(1))
        first = self.class_embedding.tensor.expand(len(pixels), 1, -1)
        return torch.cat((first, x), dim=1) + self.position_embedding.weight.tensor


class ClipAttention(Layer):
    """Attention of all patches to all patches of their image."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: ClipTower) -> None:
        self.attend = tower_attention(device)
        size = tower.hidden_size
        self.num_heads = tower.num_heads
        self.qkv_proj = ReplicatedQkv(device, dtype, size, bias=True)
        self.out_proj = ReplicatedLinear(device, dtype, size, size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L, size]."""
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv_proj.forward(x).chunk(3, dim=-1)
        )
        return self.out_proj.forward(self.attend(q, k, v).transpose(1, 2).flatten(2))


class ClipFeedForward(Layer):
    """Two linear layers with an activation between them."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: ClipTower) -> None:
        self.activation = tower.activation
        self.fc1 = ReplicatedLinear(device, dtype, tower.hidden_size, tower.intermediate_size, bias=True)
        self.fc2 = ReplicatedLinear(device, dtype, tower.intermediate_size, tower.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L, size]."""
        return self.fc2.forward(activate(self.activation, self.fc1.forward(x)))


class ClipLayer(Layer):
    """One block."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: ClipTower) -> None:
        self.layer_norm1 = LayerNorm(device, dtype, tower.hidden_size, tower.eps)
        self.self_attn = ClipAttention(device, dtype, tower)
        self.layer_norm2 = LayerNorm(device, dtype, tower.hidden_size, tower.eps)
        self.mlp = ClipFeedForward(device, dtype, tower)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L, size]."""
        x = x + self.self_attn.forward(self.layer_norm1.forward(x))
        return x + self.mlp.forward(self.layer_norm2.forward(x))


class ClipVisionTower(Layer):
    """The tower up to the layer whose output is wanted; no norm follows that."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: ClipTower) -> None:
        self.embeddings = ClipEmbeddings(device, dtype, tower)
        self.pre_layrnorm = LayerNorm(device, dtype, tower.hidden_size, tower.eps)
        self.layers = [ClipLayer(device, dtype, tower) for _ in range(tower.num_layers)]

    def slices(self, pixels: Tensor) -> Slices[Tensor]:
        """[B, 3, height, width] -> [B, 1 + patches, size], the class embedding's vector first."""
        x = self.pre_layrnorm.forward(self.embeddings.forward(pixels))
        return (yield from through(self.layers, x))

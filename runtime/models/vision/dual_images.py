"""The towers for images of CLIP and SigLIP, which make one vector of each image: CLIP projects that of the
class embedding, SigLIP attends to all patches from a learned query. SigLIP 2's NaFlex (Tschannen et al.,
2025) takes images of any shape, and interpolates its learned positions.

Every rank has all of their weights.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime.devices.base import Device
from runtime.layers.attention.towers import tower_attention
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import ReplicatedEmbedding, ReplicatedLinear, replicated_weight
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.dual_config import DualImages
from runtime.models.config.renames import Renames
from runtime.models.vision.clip import ClipEmbeddings, ClipLayer
from runtime.models.vision.mlp import PlainMlp
from runtime.models.vision.patches import PatchProjection
from runtime.models.vision.slices import Slices, through


class SiglipEmbeddings(Layer):
    """Patches as vectors with their positions."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: ClipTower) -> None:
        self.patch_embedding = PatchProjection(device, dtype, tower.hidden_size, tower.patch_size, bias=True)
        self.position_embedding = ReplicatedEmbedding(device, dtype, tower.num_patches, tower.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, height, width] -> [B, patches, size]."""
        return self.patch_embedding.forward(pixels) + self.position_embedding.weight.tensor


class NaflexEmbeddings(Layer):
    """Patches of images of any shape as vectors, with positions between those of a square table."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: ClipTower) -> None:
        self.side = tower.image_size // tower.patch_size
        size, values = tower.hidden_size, 3 * tower.patch_size**2
        self.patch_embedding = ReplicatedLinear(device, dtype, values, size, bias=True)
        self.position_embedding = ReplicatedEmbedding(device, dtype, tower.num_patches, size)

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """[B, rows * columns, 3 * patch_size^2] -> [B, rows * columns, size]."""
        table = self.position_embedding.weight.tensor.float().unflatten(0, (self.side, self.side))
        by_row, by_column = (interpolation(count, self.side, table.device) for count in (rows, columns))
        places = torch.einsum("rh,cw,hwd->rcd", by_row, by_column, table).flatten(0, 1)
        return self.patch_embedding.forward(patches) + places.to(patches.dtype)


def interpolation(count: int, side: int, device: torch.device) -> Tensor:
    """Weights of `side` entries in each of `count` places on the same axis, float32 [count, side]: linear,
    and of all entries that a place stands for where there are more of these."""
    scale = side / count
    centers = (torch.arange(count, device=device).float() + 0.5) * scale - 0.5
    distances = (torch.arange(side, device=device) - centers.unsqueeze(1)).abs() / max(scale, 1.0)
    weights = (1 - distances).clamp_min(0)
    return weights / weights.sum(1, keepdim=True)


class ProbeAttention(Layer):
    """Attention of a query to all patches, with the names of torch's MultiheadAttention."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: ClipTower) -> None:
        self.attend = tower_attention(device)
        size, self.num_heads = tower.hidden_size, tower.num_heads
        self.in_proj_weight = replicated_weight(device, dtype, 3 * size, size)
        self.in_proj_bias = replicated_weight(device, dtype, 3 * size)
        self.out_proj = ReplicatedLinear(device, dtype, size, size, bias=True)

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        """[B, 1, size] and [B, L, size] -> [B, 1, size]."""
        weights, biases = self.in_proj_weight.tensor.chunk(3), self.in_proj_bias.tensor.chunk(3)
        parts = (
            linear(part, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part, weight, bias in zip((query, x, x), weights, biases, strict=True)
        )
        return self.out_proj.forward(self.attend(*parts).transpose(1, 2).flatten(2))


class ProbeHead(Layer):
    """From the vectors of an image's patches to one."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: ClipTower) -> None:
        self.probe = replicated_weight(device, dtype, 1, 1, tower.hidden_size)
        self.attention = ProbeAttention(device, dtype, tower)
        self.layernorm = LayerNorm(device, dtype, tower.hidden_size, tower.eps)
        self.mlp = PlainMlp(device, dtype, tower.hidden_size, tower.intermediate_size, tower.activation)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, 1, size]."""
        x = self.attention.forward(self.probe.tensor.expand(len(x), -1, -1), x)
        return x + self.mlp.forward(self.layernorm.forward(x))


class DualImageEncoder(Layer):
    """See MediaEncoder. An image has one row."""

    renames: Renames = ()  # models/dual_encoder.py names the tensors

    def __init__(self, device: Device, dtype: torch.dtype, config: DualImages) -> None:
        tower, size = config.tower, config.tower.hidden_size
        self.torch_device, self.dtype = device.torch_device, dtype
        self.output_size = config.output_size
        self.embeddings: SiglipEmbeddings | ClipEmbeddings | NaflexEmbeddings
        if config.is_naflex:
            self.embeddings = NaflexEmbeddings(device, dtype, tower)
        else:
            self.embeddings = (SiglipEmbeddings if config.is_siglip else ClipEmbeddings)(device, dtype, tower)
        self.pre_layrnorm: LayerNorm | None = None
        self.head: ProbeHead | None = None
        self.visual_projection: ReplicatedLinear | None = None
        if config.is_siglip:
            self.head = ProbeHead(device, dtype, tower)
        else:
            self.pre_layrnorm = LayerNorm(device, dtype, size, tower.eps)
            self.visual_projection = ReplicatedLinear(device, dtype, size, config.output_size, bias=False)
        self.layers = [ClipLayer(device, dtype, tower) for _ in range(tower.num_layers)]
        self.post_layernorm = LayerNorm(device, dtype, size, tower.eps)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """The vector [1, output size] of each image, float32 [3, image_size, image_size], or NaFlex's patches
        [L, 3 * patch_size^2]."""
        pixels = upload(np.concatenate([one.values for one in media]), self.torch_device)
        pixels = pixels.view(len(media), *media[0].shape).to(self.dtype)
        if isinstance(self.embeddings, NaflexEmbeddings):
            x = self.embeddings.forward(pixels, *media[0].grid[1:])
        else:
            x = self.embeddings.forward(pixels)
        x = x if self.pre_layrnorm is None else self.pre_layrnorm.forward(x)
        x = yield from through(self.layers, x)
        if self.head is not None:
            return list(self.head.forward(self.post_layernorm.forward(x)))
        assert self.visual_projection is not None, "CLIP projects"
        return list(self.visual_projection.forward(self.post_layernorm.forward(x[:, :1])))

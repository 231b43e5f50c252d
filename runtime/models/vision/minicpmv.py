"""The encoder of MiniCPM-V 4.6: a SigLIP vision tower (Zhai et al., 2023) over images of any size. Behind one
of its layers patches attend within squares of them, which become one vector each, and behind the last squares
of these are projected.

Every rank has all of its weights.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu

from runtime.devices.base import Device
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import ReplicatedEmbedding, ReplicatedLinear
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.minicpmv_config import WINDOW, MiniCpmVEncoder
from runtime.models.config.renames import Renames
from runtime.models.vision.activations import activate
from runtime.models.vision.clip import ClipAttention, ClipLayer
from runtime.models.vision.gemma_vision import SiglipProjection
from runtime.models.vision.patches import join_grid, nearest
from runtime.models.vision.slices import Slices, parts_done

MERGER_EPS = 1e-6


class AnySizeEmbeddings(Layer):
    """Patches as vectors, with those positions of a square table that are nearest to theirs."""

    def __init__(self, device: Device, dtype: torch.dtype, config: MiniCpmVEncoder) -> None:
        tower = config.tower
        self.torch_device, self.side = device.torch_device, tower.image_size // tower.patch_size
        self.patch_embedding = SiglipProjection(device, dtype, tower.hidden_size, tower.patch_size)
        self.position_embedding = ReplicatedEmbedding(device, dtype, self.side**2, tower.hidden_size)

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """[B, L, 3, height, width] of `rows` x `columns` patches, row by row -> [B, L, size]."""
        high, wide = (nearest(torch.arange(count) / count, self.side) for count in (rows, columns))
        places = (high[:, None] * self.side + wide).flatten().to(self.torch_device)
        return self.patch_embedding.forward(patches.flatten(2)) + self.position_embedding.forward(places)


class WindowMerger(Layer):
    """Attention of patches within their square, and each square as one vector of the tower's size."""

    def __init__(self, device: Device, dtype: torch.dtype, config: MiniCpmVEncoder) -> None:
        tower, size = config.tower, config.tower.hidden_size
        joined, inner = size * WINDOW**2, tower.intermediate_size * WINDOW**2
        self.layer_norm1 = LayerNorm(device, dtype, size, tower.eps)
        self.self_attn = ClipAttention(device, dtype, tower)
        self.pre_norm = LayerNorm(device, dtype, joined, tower.eps)
        self.linear_1 = ReplicatedLinear(device, dtype, joined, inner, bias=True)
        self.linear_2 = ReplicatedLinear(device, dtype, inner, size, bias=True)

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """[B, rows * columns, size] -> [B, rows * columns / WINDOW^2, size]."""
        count, _, size = x.shape
        squares = join_grid(x, rows, columns, WINDOW).view(-1, WINDOW**2, size)
        squares = squares + self.self_attn.forward(self.layer_norm1.forward(squares))
        inner = activate(
            "gelu_pytorch_tanh", self.linear_1.forward(self.pre_norm.forward(squares.flatten(1)))
        )
        return (self.linear_2.forward(inner) + squares.mean(dim=1)).view(count, -1, size)


class MiniCpmMerger(Layer):
    """From squares of the tower's vectors to embeddings of the text model."""

    def __init__(self, device: Device, dtype: torch.dtype, config: MiniCpmVEncoder) -> None:
        joined = config.tower.hidden_size * WINDOW**2
        self.pre_norm = LayerNorm(device, dtype, joined, MERGER_EPS)
        self.linear_1 = ReplicatedLinear(device, dtype, joined, joined, bias=True)
        self.linear_2 = ReplicatedLinear(device, dtype, joined, config.output_size, bias=True)

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """[B, rows * columns, tower's size] -> [B, rows * columns / WINDOW^2, text model's size]."""
        joined = self.pre_norm.forward(join_grid(x, rows, columns, WINDOW))
        return self.linear_2.forward(gelu(self.linear_1.forward(joined)))


class MiniCpmV(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("vision_tower.encoder.layers.", "vision_tower.layers."),
        ("vision_tower.", "media_encoder."),
        ("merger.mlp.0.", "media_encoder.merger."),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: MiniCpmVEncoder) -> None:
        tower = config.tower
        self.torch_device, self.dtype = device.torch_device, dtype
        self.output_size, self.joined_layer = config.output_size, config.joined_layer
        self.embeddings = AnySizeEmbeddings(device, dtype, config)
        self.layers = [ClipLayer(device, dtype, tower) for _ in range(tower.num_layers)]
        self.post_layernorm = LayerNorm(device, dtype, tower.hidden_size, tower.eps)
        self.vit_merger = WindowMerger(device, dtype, config)
        self.merger = MiniCpmMerger(device, dtype, config)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """Patches of images, float32 [L, 3, height, width] each, row by row -> of each its rows, [L /
        merge_size^2, hidden]."""
        _, rows, columns = media[0].grid
        patches = upload(np.concatenate([one.values for one in media]), self.torch_device)
        x = self.embeddings.forward(patches.view(len(media), *media[0].shape).to(self.dtype), rows, columns)
        joined = len(self.layers) if self.joined_layer is None else self.joined_layer + 1
        works = [WINDOW**2] * joined + [1] * (len(self.layers) - joined)
        for index, (layer, done) in enumerate(zip(self.layers, parts_done(works), strict=True)):
            x = layer.forward(x)
            if index == self.joined_layer:
                x = self.vit_merger.forward(x, rows, columns)
                rows, columns = rows // WINDOW, columns // WINDOW
            yield done
        return list(self.merger.forward(self.post_layernorm.forward(x), rows, columns))

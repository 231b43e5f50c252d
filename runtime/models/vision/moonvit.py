"""The encoder of Kimi-VL (Kimi Team, 2025) and of images in Kimi K2.5: MoonViT, a vision transformer over
images of any size, and a projector of neighbouring patches.

Patches come in the order of the projector: those that become one row are neighbours. Every rank has all
weights.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu

from runtime.devices.base import Device
from runtime.layers.attention.towers import tower_attention
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import ReplicatedLinear, replicated_weight
from runtime.layers.upload import upload, upload_int64
from runtime.layers.weight import Layer, WeightOnly
from runtime.messages.media import MediaValues
from runtime.models.config.kimi_vision_config import KimiEncoder
from runtime.models.config.renames import Renames
from runtime.models.vision.activations import activate
from runtime.models.vision.gemma_vision import SiglipProjection
from runtime.models.vision.learned_positions import cubic_taps, table_entries
from runtime.models.vision.qwen_vl import patch_places
from runtime.models.vision.rotary import axis_angles, rotated_pairs
from runtime.models.vision.slices import Slices, through

EPS = 1e-5


class MoonVitPatches(Layer):
    """Patches as vectors, with their learned positions."""

    def __init__(self, device: Device, dtype: torch.dtype, config: KimiEncoder) -> None:
        size, side = config.hidden_size, config.table_side
        self.torch_device, self.side = device.torch_device, side
        self.proj = SiglipProjection(device, dtype, size, config.patch_size)
        self.pos_emb = WeightOnly(replicated_weight(device, dtype, side, side, size))

    def forward(self, patches: Tensor, places: np.ndarray, rows: int, columns: int) -> Tensor:
        """[B, L, 3, height, width] in these places of `rows` and `columns`, int64 [L, 2] -> [B, L, size]."""
        x = self.proj.forward(patches.flatten(2))
        side, table = self.side, self.pos_emb.weight.tensor.flatten(0, 1)
        entries, weights = table_entries(
            cubic_taps(places[:, 0], rows, side), cubic_taps(places[:, 1], columns, side), side
        )
        found = embedding(upload_int64(entries.ravel(), self.torch_device).view(entries.shape), table)
        weighed = found * upload(weights, self.torch_device).view(*entries.shape, 1)
        return x + weighed.sum(dim=1).to(x.dtype)


class MoonVitLayer(Layer):
    """One block: attention of all patches to all patches of their image, and a feed-forward."""

    def __init__(self, device: Device, dtype: torch.dtype, config: KimiEncoder) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self.attend = tower_attention(device)
        self.num_heads, self.activation = config.num_heads, config.activation
        self.norm0 = LayerNorm(device, dtype, size, EPS)
        self.wqkv = ReplicatedLinear(device, dtype, size, 3 * size, bias=True)
        self.wo = ReplicatedLinear(device, dtype, size, size, bias=True)
        self.norm1 = LayerNorm(device, dtype, size, EPS)
        self.fc0 = ReplicatedLinear(device, dtype, size, inner, bias=True)
        self.fc1 = ReplicatedLinear(device, dtype, inner, size, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, L, size]; cosines and sines float32 [L, head size / 2] -> [B, L, size]."""
        qkv = self.wqkv.forward(self.norm0.forward(x))
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        parts = (part.transpose(1, 2) for part in (rotated_pairs(q, cos, sin), rotated_pairs(k, cos, sin), v))
        x = x + self.wo.forward(self.attend(*parts).transpose(1, 2).flatten(2))
        inner = activate(self.activation, self.fc0.forward(self.norm1.forward(x)))
        return x + self.fc1.forward(inner)


class MoonVitProjector(Layer):
    """From neighbouring patches to one embedding of the text model."""

    def __init__(self, device: Device, dtype: torch.dtype, config: KimiEncoder) -> None:
        self.merged_size = config.hidden_size * config.merge_size**2
        self.pre_norm = LayerNorm(device, dtype, config.hidden_size, config.projector_eps)
        self.linear_1 = ReplicatedLinear(device, dtype, self.merged_size, self.merged_size, bias=True)
        self.linear_2 = ReplicatedLinear(device, dtype, self.merged_size, config.output_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L / merge_size^2, text model's size]."""
        merged = self.pre_norm.forward(x).reshape(len(x), -1, self.merged_size)
        return self.linear_2.forward(gelu(self.linear_1.forward(merged)))


class MoonVit(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("vision_tower.encoder.", "vision_tower."),
        ("vision_tower.blocks.", "vision_tower.layers."),
        (".mlp.fc0.", ".fc0."),
        (".mlp.fc1.", ".fc1."),
        ("vision_tower.", "media_encoder."),
        ("mm_projector.proj.0.", "media_encoder.projector.linear_1."),
        ("mm_projector.proj.2.", "media_encoder.projector.linear_2."),
        ("mm_projector.", "media_encoder.projector."),
        ("multi_modal_projector.", "media_encoder.projector."),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: KimiEncoder) -> None:
        self.torch_device, self.dtype, self.config = device.torch_device, dtype, config
        self.output_size = config.output_size
        self.patch_embed = MoonVitPatches(device, dtype, config)
        self.layers = [MoonVitLayer(device, dtype, config) for _ in range(config.num_layers)]
        self.final_layernorm = LayerNorm(device, dtype, config.hidden_size, EPS)
        self.projector = MoonVitProjector(device, dtype, config)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """Patches of images, float32 [L, 3, height, width] each -> of each its embeddings, [L / merge_size^2,
        hidden]."""
        _, rows, columns = media[0].grid
        patches = upload(np.concatenate([one.values for one in media]), self.torch_device)
        places = patch_places(rows, columns, self.config.merge_size)
        x = self.patch_embed.forward(
            patches.view(len(media), *media[0].shape).to(self.dtype), places, rows, columns
        )
        x = yield from through(self.layers, x, *self._angles(places))
        return list(self.projector.forward(self.final_layernorm.forward(x)))

    def _angles(self, places: np.ndarray) -> tuple[Tensor, Tensor]:
        """Cosines and sines of patches in these places, int64 [L, 2] -> float32 [L, head size / 2] each:
        pairs rotate with columns and rows by turns."""
        config = self.config
        size = config.hidden_size // config.num_heads // 2
        by_row, by_column = (
            axis_angles(upload_int64(places[:, axis].copy(), self.torch_device), size, config.theta)
            for axis in (0, 1)
        )
        angles = torch.stack((by_column, by_row), dim=2).flatten(1)
        return angles.cos(), angles.sin()

"""The encoders of Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025): a vision transformer over
images of any size, whose patches have rotary positions by row and column, and a merger of neighbouring
patches. That of 2.5 has gated feed-forwards and attends within windows in most layers.

Patches come in the order of the merger: those that become one row are neighbours.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from runtime.devices.base import Device
from runtime.layers.attention.towers import tower_attention
from runtime.layers.norm import LayerNorm, RMSNorm
from runtime.layers.parallel.replicated import (
    ReplicatedGateUp,
    ReplicatedLinear,
    ReplicatedQkv,
    replicated_weight,
)
from runtime.layers.upload import upload, upload_int64
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.qwen_vl_config import QwenVlEncoder
from runtime.models.config.renames import Renames
from runtime.models.vision.activations import activate
from runtime.models.vision.slices import Slices, layer_work, parts_done

THETA = 10000.0


def open_norm(device: Device, dtype: torch.dtype, config: QwenVlEncoder) -> LayerNorm | RMSNorm:
    """A norm of the tower."""
    if config.is_gated:
        return RMSNorm(device, dtype, config.hidden_size, config.eps, may_have_bias=False)
    return LayerNorm(device, dtype, config.hidden_size, config.eps)


class PatchProjection(Layer):
    """A convolution over patches whose kernels do not overlap: one product for each patch."""

    def __init__(self, device: Device, dtype: torch.dtype, config: QwenVlEncoder) -> None:
        size, patch = config.hidden_size, config.patch_size
        self.weight = replicated_weight(device, dtype, size, 3, config.num_frames, patch, patch)
        self.bias = replicated_weight(device, dtype, size) if config.has_patch_bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """[N, 3, frames, height, width] -> [N, size]."""
        bias = None if self.bias is None else self.bias.tensor
        return linear(patches.flatten(1), self.weight.tensor.flatten(1), bias)


class PatchEmbedding(Layer):
    """Patches as vectors. Those of an image are as many equal frames as a patch takes."""

    def __init__(self, device: Device, dtype: torch.dtype, config: QwenVlEncoder) -> None:
        self.num_frames = config.num_frames
        self.proj = PatchProjection(device, dtype, config)

    def forward(self, patches: Tensor) -> Tensor:
        """[N, 3, height, width], or [N, 3, frames, height, width] of videos -> [N, size]."""
        if patches.dim() == 4:
            patches = patches.unsqueeze(2).expand(-1, -1, self.num_frames, -1, -1)
        return self.proj.forward(patches)


class WindowAttention(Layer):
    """Attention of patches to those of their group."""

    def __init__(self, device: Device, dtype: torch.dtype, config: QwenVlEncoder) -> None:
        size = config.hidden_size
        self.attend = tower_attention(device)
        self.num_heads = config.num_heads
        self.qkv: ReplicatedLinear | None = None
        self.qkv_proj: ReplicatedQkv | None = None
        if config.has_joined_qkv:
            self.qkv = ReplicatedLinear(device, dtype, size, 3 * size, bias=config.has_qkv_bias)
        else:
            self.qkv_proj = ReplicatedQkv(device, dtype, size, bias=config.has_qkv_bias)
        self.proj = ReplicatedLinear(device, dtype, size, size, bias=config.has_bias)

    def forward(self, x: Tensor, groups: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, size] of B images; cosines and sines float32 [L, head size / 2] -> [B, L, size]. `groups`:
        int64 [groups, patches] each, in all each of the L patches once."""
        qkv = self.qkv or self.qkv_proj
        assert qkv is not None
        q, k, v = qkv.forward(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        found = torch.empty_like(v)
        for group in groups:
            parts = (one[:, group].transpose(2, 3) for one in (q, k, v))
            found[:, group] = self.attend(*parts).transpose(2, 3)
        return self.proj.forward(found.flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, L, heads, D] with dimensions i and i + D / 2 rotated, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class PlainMlp(Layer):
    """The feed-forward of Qwen2-VL."""

    def __init__(self, device: Device, dtype: torch.dtype, config: QwenVlEncoder) -> None:
        self.activation = config.activation
        self.fc1 = ReplicatedLinear(device, dtype, config.hidden_size, config.intermediate_size, bias=True)
        self.fc2 = ReplicatedLinear(device, dtype, config.intermediate_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L, size]."""
        return self.fc2.forward(activate(self.activation, self.fc1.forward(x)))


class GatedMlp(Layer):
    """The feed-forward of Qwen2.5-VL."""

    def __init__(self, device: Device, dtype: torch.dtype, config: QwenVlEncoder) -> None:
        self.activation = config.activation
        sizes = config.hidden_size, config.intermediate_size
        self.gate_up_proj = ReplicatedGateUp(device, dtype, *sizes, bias=config.has_bias)
        self.down_proj = ReplicatedLinear(device, dtype, *reversed(sizes), bias=config.has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L, size]."""
        gate, up = self.gate_up_proj.forward(x).chunk(2, dim=-1)
        return self.down_proj.forward(activate(self.activation, gate) * up)


class Block(Layer):
    """One block of the tower."""

    def __init__(self, device: Device, dtype: torch.dtype, config: QwenVlEncoder) -> None:
        self.norm1 = open_norm(device, dtype, config)
        self.attn = WindowAttention(device, dtype, config)
        self.norm2 = open_norm(device, dtype, config)
        self.mlp = (GatedMlp if config.is_gated else PlainMlp)(device, dtype, config)

    def forward(self, x: Tensor, groups: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        """As WindowAttention.forward."""
        x = x + self.attn.forward(self.norm1.forward(x), groups, cos, sin)
        return x + self.mlp.forward(self.norm2.forward(x))


class Merger(Layer):
    """From neighbouring patches to one embedding of the text model."""

    def __init__(self, device: Device, dtype: torch.dtype, config: QwenVlEncoder) -> None:
        self.merged_size = config.hidden_size * config.merge_size**2
        self.ln_q = open_norm(device, dtype, config)
        self.fc1 = ReplicatedLinear(device, dtype, self.merged_size, self.merged_size, bias=True)
        self.fc2 = ReplicatedLinear(device, dtype, self.merged_size, config.output_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L / merge_size^2, text model's size]."""
        merged = self.ln_q.forward(x).reshape(len(x), -1, self.merged_size)
        return self.fc2.forward(gelu(self.fc1.forward(merged)))


class QwenVl(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("visual.merger.mlp.0.", "media_encoder.merger.fc1."),
        ("visual.merger.mlp.2.", "media_encoder.merger.fc2."),
        ("visual.", "media_encoder."),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: QwenVlEncoder) -> None:
        self.torch_device, self.dtype, self.config = device.torch_device, dtype, config
        self.output_size = config.output_size
        self.patch_embed = PatchEmbedding(device, dtype, config)
        self.blocks = [Block(device, dtype, config) for _ in range(config.num_layers)]
        self.merger = Merger(device, dtype, config)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """Patches of images, float32 [L, 3, height, width] each, or of videos, [L, 3, frames, height, width]
        -> of each its embeddings, [L / merge_size^2, hidden]. The patches of a video attend within their
        moment alone, as those of an image."""
        config, (count, rows, columns) = self.config, media[0].grid
        patches = upload(np.concatenate([one.values for one in media]), self.torch_device)
        x = self.patch_embed.forward(patches.view(-1, *media[0].shape[1:]).to(self.dtype))
        x = x.view(len(media) * count, rows * columns, -1)
        places = patch_places(rows, columns, config.merge_size)
        cos, sin = patch_angles(
            upload_int64(places.ravel(), self.torch_device).view(-1, 2), config.head_dim // 2
        )
        whole = [torch.arange(len(places), device=self.torch_device).unsqueeze(0)]
        windows = [
            upload_int64(group.ravel(), self.torch_device).view(group.shape)
            for group in windows_of(places, config.window_patches)
        ]
        for index, done in enumerate(self._parts_done(len(places))):
            groups = whole if config.is_full(index) else windows
            x = self.blocks[index].forward(x, groups, cos, sin)
            yield done
        return list(self.merger.forward(x).reshape(len(media), -1, config.output_size))

    def _parts_done(self, count: int) -> list[float]:
        """The part of the work that is done behind each block, for images of so many patches."""
        config = self.config
        attended = [
            count if config.is_full(index) else min(config.window_patches**2, count)
            for index in range(config.num_layers)
        ]
        return parts_done([layer_work(count, config.hidden_size, one) for one in attended])


def patch_angles(places: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of patches, int64 [L, 2] -> cosines and sines, float32 [L, size] each: of rows before
    those of columns. `size`: half of a head's."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=places.device) / size
    angles = (places.float().unsqueeze(2) / THETA**exponents).flatten(1)
    return angles.cos(), angles.sin()


def patch_places(rows: int, columns: int, merge: int) -> np.ndarray:
    """Rows and columns of patches in the order in which they are encoded, int64 [rows * columns, 2]."""
    places = np.moveaxis(np.indices((rows, columns)), 0, 2)
    squares = places.reshape(rows // merge, merge, columns // merge, merge, 2)
    return squares.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def windows_of(places: np.ndarray, side: int) -> list[np.ndarray]:
    """The patches of each window of `side` rows and columns, int64 [windows, patches] for each number of
    patches: windows at edges have fewer. `side` 0: none."""
    if not side:
        return []
    windows = places // side
    keys = windows[:, 0] * (windows[:, 1].max() + 1) + windows[:, 1]
    order, starts = np.argsort(keys, kind="stable"), np.flatnonzero(np.diff(np.sort(keys))) + 1
    by_size: dict[int, list[np.ndarray]] = {}
    for group in np.split(order, starts):
        by_size.setdefault(len(group), []).append(group)
    return [np.stack(groups) for groups in by_size.values()]

"""The encoders of Pixtral (Agrawal et al., 2024) and Mistral Small 3.1: a vision transformer over images of
any size, whose patches have rotary positions by row and column, gated feed-forwards and RMS norms; and a
projector, which in Mistral Small 3.1 joins neighbouring patches first.

Every rank has all of its weights.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.attention.towers import tower_attention
from runtime.layers.norm import RMSNorm
from runtime.layers.parallel.replicated import ReplicatedLinear, ReplicatedQkv
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.pixtral_config import PixtralEncoder
from runtime.models.config.renames import Renames
from runtime.models.vision.activations import activate
from runtime.models.vision.mlp import GatedMlp
from runtime.models.vision.patches import PatchProjection
from runtime.models.vision.qwen_vl import rotated
from runtime.models.vision.slices import Slices, through

EPS = 1e-5


class PixtralAttention(Layer):
    """Attention of all patches to all patches of their image."""

    def __init__(self, device: Device, dtype: torch.dtype, config: PixtralEncoder) -> None:
        size = config.hidden_size
        self.attend = tower_attention(device)
        self.num_heads = config.num_heads
        self.qkv_proj = ReplicatedQkv(device, dtype, size, bias=False)
        self.o_proj = ReplicatedLinear(device, dtype, size, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, L, size]; cosines and sines float32 [L, head size / 2] -> [B, L, size]."""
        q, k, v = self.qkv_proj.forward(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        parts = (part.transpose(1, 2) for part in (rotated(q, cos, sin), rotated(k, cos, sin), v))
        return self.o_proj.forward(self.attend(*parts).transpose(1, 2).flatten(2))


class PixtralLayer(Layer):
    """One block."""

    def __init__(self, device: Device, dtype: torch.dtype, config: PixtralEncoder) -> None:
        self.attention_norm = RMSNorm(device, dtype, config.hidden_size, EPS, may_have_bias=False)
        self.attention = PixtralAttention(device, dtype, config)
        self.ffn_norm = RMSNorm(device, dtype, config.hidden_size, EPS, may_have_bias=False)
        self.feed_forward = GatedMlp(
            device, dtype, config.hidden_size, config.intermediate_size, config.activation
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As PixtralAttention.forward."""
        x = x + self.attention.forward(self.attention_norm.forward(x), cos, sin)
        return x + self.feed_forward.forward(self.ffn_norm.forward(x))


class PixtralTower(Layer):
    """The tower up to the layer whose output is wanted; no norm follows that."""

    def __init__(self, device: Device, dtype: torch.dtype, config: PixtralEncoder) -> None:
        self.theta, self.head_dim = config.theta, config.hidden_size // config.num_heads
        self.patch_conv = PatchProjection(device, dtype, config.hidden_size, config.patch_size, bias=False)
        self.ln_pre = RMSNorm(device, dtype, config.hidden_size, EPS, may_have_bias=False)
        self.layers = [PixtralLayer(device, dtype, config) for _ in range(config.num_layers)]

    def slices(self, pixels: Tensor, rows: int, columns: int) -> Slices[Tensor]:
        """[B, 3, height, width] of `rows` x `columns` patches -> [B, patches, size]."""
        x = self.ln_pre.forward(self.patch_conv.forward(pixels))
        return (yield from through(self.layers, x, *self._angles(rows, columns, x.device)))

    def _angles(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [rows * columns, head size / 2] each. Rows have every other of the
        frequencies, columns those between."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        frequencies = 1.0 / self.theta**exponents
        by_row = torch.arange(rows, device=device).float()[:, None] * frequencies[0::2]
        by_column = torch.arange(columns, device=device).float()[:, None] * frequencies[1::2]
        angles = torch.cat((by_row.repeat_interleave(columns, dim=0), by_column.repeat(rows, 1)), dim=1)
        return angles.cos(), angles.sin()


class PatchMerger(Layer):
    """Neighbouring patches as one vector of the tower's size."""

    def __init__(self, device: Device, dtype: torch.dtype, config: PixtralEncoder) -> None:
        self.merge = config.merge_size
        size = config.hidden_size
        self.merging_layer = ReplicatedLinear(device, dtype, size * self.merge**2, size, bias=False)

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """[B, rows * columns, size] -> [B, rows * columns / merge^2, size]."""
        count, merge = len(x), self.merge
        squares = x.view(count, rows // merge, merge, columns // merge, merge, -1).permute(0, 1, 3, 5, 2, 4)
        return self.merging_layer.forward(squares.reshape(count, rows * columns // merge**2, -1))


class PixtralProjector(Layer):
    """From the tower's vectors to embeddings of the text model."""

    def __init__(self, device: Device, dtype: torch.dtype, config: PixtralEncoder) -> None:
        size, out = config.hidden_size, config.output_size
        self.activation = config.projector_activation
        self.norm: RMSNorm | None = None
        self.patch_merger: PatchMerger | None = None
        if config.merger_eps is not None:
            self.norm = RMSNorm(device, dtype, size, config.merger_eps, may_have_bias=False)
            self.patch_merger = PatchMerger(device, dtype, config)
        self.linear_1 = ReplicatedLinear(device, dtype, size, out, bias=config.has_bias)
        self.linear_2 = ReplicatedLinear(device, dtype, out, out, bias=config.has_bias)

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """[B, rows * columns, tower's size] -> [B, rows of the encoding, text model's size]."""
        if self.norm is not None and self.patch_merger is not None:
            x = self.patch_merger.forward(self.norm.forward(x), rows, columns)
        return self.linear_2.forward(activate(self.activation, self.linear_1.forward(x)))


class Pixtral(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("vision_tower.transformer.layers.", "vision_tower.layers."),
        ("vision_tower.", "media_encoder.vision_tower."),
        ("multi_modal_projector.", "media_encoder.multi_modal_projector."),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: PixtralEncoder) -> None:
        self.torch_device, self.dtype = device.torch_device, dtype
        self.output_size, self.patch_size = config.output_size, config.patch_size
        self.vision_tower = PixtralTower(device, dtype, config)
        self.multi_modal_projector = PixtralProjector(device, dtype, config)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """The rows [num_rows, hidden] of each image; all have one size, float32 [3, height, width]."""
        shape = media[0].shape
        rows, columns = (side // self.patch_size for side in shape[1:])
        pixels = upload(np.concatenate([one.values for one in media]), self.torch_device)
        x = yield from self.vision_tower.slices(pixels.view(len(media), *shape).to(self.dtype), rows, columns)
        return list(self.multi_modal_projector.forward(x, rows, columns))

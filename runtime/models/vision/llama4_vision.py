"""The encoder of Llama 4 (Meta, 2025): a vision transformer over square tiles of an image, whose class
embedding comes last and has no rotary position; squares of patches as one vector, and three projections.

Every rank has all of its weights.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, pad

from runtime.devices.base import Device
from runtime.layers.attention.towers import tower_attention
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import ReplicatedLinear, ReplicatedQkv, replicated_weight
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.llama4_vision_config import Llama4Encoder
from runtime.models.config.renames import Renames
from runtime.models.vision.clip import cut_patches
from runtime.models.vision.mlp import PlainMlp
from runtime.models.vision.patches import join_squares
from runtime.models.vision.rotary import axis_angles, rotated_pairs
from runtime.models.vision.slices import Slices, through

EPS = 1e-5


class Llama4TileAttention(Layer):
    """Attention of all patches to all patches of their tile."""

    def __init__(self, device: Device, dtype: torch.dtype, config: Llama4Encoder) -> None:
        size = config.hidden_size
        self.attend = tower_attention(device)
        self.num_heads = config.num_heads
        self.qkv_proj = ReplicatedQkv(device, dtype, size, bias=True)
        self.o_proj = ReplicatedLinear(device, dtype, size, size, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, L, size]; cosines and sines float32 [L, head size / 2] -> [B, L, size]."""
        q, k, v = self.qkv_proj.forward(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        parts = (part.transpose(1, 2) for part in (rotated_pairs(q, cos, sin), rotated_pairs(k, cos, sin), v))
        return self.o_proj.forward(self.attend(*parts).transpose(1, 2).flatten(2))


class Llama4TileLayer(Layer):
    """One block."""

    def __init__(self, device: Device, dtype: torch.dtype, config: Llama4Encoder) -> None:
        size = config.hidden_size
        self.input_layernorm = LayerNorm(device, dtype, size, EPS)
        self.self_attn = Llama4TileAttention(device, dtype, config)
        self.post_attention_layernorm = LayerNorm(device, dtype, size, EPS)
        self.mlp = PlainMlp(device, dtype, size, config.intermediate_size, "gelu")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As Llama4TileAttention.forward."""
        x = x + self.self_attn.forward(self.input_layernorm.forward(x), cos, sin)
        return x + self.mlp.forward(self.post_attention_layernorm.forward(x))


class Llama4Adapter(Layer):
    """Squares of patches through two layers."""

    def __init__(self, device: Device, dtype: torch.dtype, config: Llama4Encoder) -> None:
        merged = config.hidden_size * config.merge_size**2
        self.merge = config.merge_size
        self.fc1 = ReplicatedLinear(device, dtype, merged, config.adapter_size, bias=False)
        self.fc2 = ReplicatedLinear(device, dtype, config.adapter_size, config.adapter_output, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, patches, size] -> [B, patches / merge^2, adapter's output]."""
        return gelu(self.fc2.forward(gelu(self.fc1.forward(join_squares(x, self.merge)))))


class Llama4Tower(Layer):
    """The tower and its adapter."""

    def __init__(self, device: Device, dtype: torch.dtype, config: Llama4Encoder) -> None:
        size, patch = config.hidden_size, config.patch_size
        self.config = config
        self.patch_embedding = ReplicatedLinear(device, dtype, 3 * patch**2, size, bias=False)
        self.class_embedding = replicated_weight(device, dtype, size)
        self.positional_embedding_vlm = replicated_weight(device, dtype, config.side**2 + 1, size)
        self.layernorm_pre = LayerNorm(device, dtype, size, EPS)
        self.layers = [Llama4TileLayer(device, dtype, config) for _ in range(config.num_layers)]
        self.layernorm_post = LayerNorm(device, dtype, size, EPS)
        self.vision_adapter = Llama4Adapter(device, dtype, config)

    def slices(self, pixels: Tensor) -> Slices[Tensor]:
        """[B, 3, height, width] -> [B, rows, adapter's output]."""
        x = linear(cut_patches(pixels, self.config.patch_size), self.patch_embedding.weight.tensor)
        last = self.class_embedding.tensor.expand(len(x), 1, -1)
        x = torch.cat((x, last), dim=1) + self.positional_embedding_vlm.tensor
        x = self.layernorm_pre.forward(x)
        x = yield from through(self.layers, x, *self._angles(x.device))
        return self.vision_adapter.forward(self.layernorm_post.forward(x)[:, :-1])

    def _angles(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [patches + 1, head size / 2] each: half of the pairs rotate with
        columns, half with rows, both counted from 1, and none of the class embedding's."""
        config = self.config
        size = config.hidden_size // config.num_heads // 2
        counted = axis_angles(torch.arange(1, config.side + 1, device=device), size, config.theta)
        columns = counted.repeat(config.side, 1)
        rows = counted.repeat_interleave(config.side, dim=0)
        angles = pad(torch.cat((columns, rows), dim=1), (0, 0, 0, 1))
        return angles.cos(), angles.sin()


class Llama4Vision(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("vision_model.model.", "vision_model."),
        ("vision_adapter.mlp.", "vision_adapter."),
        ("patch_embedding.linear.", "patch_embedding."),
        ("vision_model.", "media_encoder.vision_model."),
        ("multi_modal_projector.linear_1.", "media_encoder.projector."),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: Llama4Encoder) -> None:
        self.torch_device, self.dtype = device.torch_device, dtype
        self.output_size = config.output_size
        self.vision_model = Llama4Tower(device, dtype, config)
        self.projector = ReplicatedLinear(
            device, dtype, config.adapter_output, config.output_size, bias=False
        )

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """The rows [num_rows, hidden] of each image; all have equally many tiles, float32
        [tiles, 3, size, size]."""
        count, *shape = media[0].shape
        pixels = upload(np.concatenate([one.values for one in media]), self.torch_device)
        x = yield from self.vision_model.slices(pixels.view(len(media) * count, *shape).to(self.dtype))
        return list(self.projector.forward(x).reshape(len(media), -1, self.output_size))

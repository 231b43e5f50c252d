"""The encoder of InternVL 3 (Zhu et al., 2025): InternViT over square tiles of an image, each with a class
embedding and learned positions; the patches of a tile are joined with their neighbours and projected.

Every rank has all of its weights.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.attention.towers import tower_attention
from runtime.layers.norm import LayerNorm, RMSNorm
from runtime.layers.parallel.replicated import ReplicatedLinear, ReplicatedQkv, replicated_weight
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.internvl_config import InternVlEncoder
from runtime.models.config.renames import Renames
from runtime.models.vision.activations import activate
from runtime.models.vision.mlp import PlainMlp
from runtime.models.vision.patches import PatchProjection, join_squares
from runtime.models.vision.slices import Slices, through

PROJECTOR_EPS = 1e-5
HEAD_EPS = 1e-6
RENAMES: Renames = (
    ("vision_tower.embeddings.patch_embeddings.", "vision_tower.embeddings."),
    ("vision_tower.encoder.layer.", "vision_tower.layers."),
    ("vision_tower.", "media_encoder.vision_tower."),
    ("multi_modal_projector.", "media_encoder.multi_modal_projector."),
)
AUTHORS_RENAMES: Renames = (
    ("vision_model.embeddings.class_embedding", "vision_model.embeddings.cls_token"),
    ("vision_model.embeddings.position_embedding", "vision_model.embeddings.position_embeddings"),
    ("vision_model.embeddings.patch_embedding.", "vision_model.embeddings.projection."),
    ("vision_model.encoder.", "vision_model."),
    (".attn.proj.", ".attention.projection_layer."),
    (".attn.", ".attention."),
    (".norm1.", ".layernorm_before."),
    (".norm2.", ".layernorm_after."),
    (".ls1", ".lambda_1"),
    (".ls2", ".lambda_2"),
    ("vision_model.", "media_encoder.vision_tower."),
    ("mlp1.0.", "media_encoder.multi_modal_projector.layer_norm."),
    ("mlp1.1.", "media_encoder.multi_modal_projector.linear_1."),
    ("mlp1.3.", "media_encoder.multi_modal_projector.linear_2."),
)


def open_norm(device: Device, dtype: torch.dtype, config: InternVlEncoder) -> LayerNorm | RMSNorm:
    """A norm of the tower's blocks."""
    if config.has_rms_norms:
        return RMSNorm(device, dtype, config.hidden_size, config.eps, may_have_bias=False)
    return LayerNorm(device, dtype, config.hidden_size, config.eps)


class TileEmbeddings(Layer):
    """Patches as vectors behind the class embedding, with their positions."""

    def __init__(self, device: Device, dtype: torch.dtype, config: InternVlEncoder) -> None:
        size = config.hidden_size
        self.cls_token = replicated_weight(device, dtype, 1, 1, size)
        self.position_embeddings = replicated_weight(device, dtype, 1, config.num_patches + 1, size)
        self.projection = PatchProjection(device, dtype, size, config.patch_size, bias=True)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, height, width] -> [B, 1 + patches, size]."""
        first = self.cls_token.tensor.expand(len(pixels), -1, -1)
        return torch.cat((first, self.projection.forward(pixels)), dim=1) + self.position_embeddings.tensor


class TileAttention(Layer):
    """Attention of all patches to all patches of their tile."""

    def __init__(self, device: Device, dtype: torch.dtype, config: InternVlEncoder) -> None:
        size = config.hidden_size
        self.attend = tower_attention(device)
        self.num_heads = config.num_heads
        self.qkv: ReplicatedLinear | None = None
        self.qkv_proj: ReplicatedQkv | None = None
        if config.authors is None:
            self.qkv_proj = ReplicatedQkv(device, dtype, size, bias=config.has_bias)
        else:
            self.qkv = ReplicatedLinear(device, dtype, size, 3 * size, bias=config.has_bias)
        self.projection_layer = ReplicatedLinear(device, dtype, size, size, bias=True)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.has_head_norms:
            self.q_norm = RMSNorm(device, dtype, size, HEAD_EPS, may_have_bias=False)
            self.k_norm = RMSNorm(device, dtype, size, HEAD_EPS, may_have_bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L, size]."""
        qkv = self.qkv or self.qkv_proj
        assert qkv is not None
        q, k, v = qkv.forward(x).chunk(3, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.forward(q), self.k_norm.forward(k)
        parts = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
        return self.projection_layer.forward(self.attend(*parts).transpose(1, 2).flatten(2))


class TileLayer(Layer):
    """One block, which scales what attention and feed-forward add."""

    def __init__(self, device: Device, dtype: torch.dtype, config: InternVlEncoder) -> None:
        size = config.hidden_size
        self.layernorm_before = open_norm(device, dtype, config)
        self.attention = TileAttention(device, dtype, config)
        self.lambda_1 = replicated_weight(device, dtype, size)
        self.layernorm_after = open_norm(device, dtype, config)
        self.mlp = PlainMlp(device, dtype, size, config.intermediate_size, config.activation)
        self.lambda_2 = replicated_weight(device, dtype, size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L, size]."""
        x = x + self.lambda_1.tensor * self.attention.forward(self.layernorm_before.forward(x))
        return x + self.lambda_2.tensor * self.mlp.forward(self.layernorm_after.forward(x))


class TileTower(Layer):
    """The tower up to the layer whose output is wanted."""

    def __init__(self, device: Device, dtype: torch.dtype, config: InternVlEncoder) -> None:
        self.embeddings = TileEmbeddings(device, dtype, config)
        self.layers = [TileLayer(device, dtype, config) for _ in range(config.num_layers)]
        self.layernorm: LayerNorm | None = None
        if config.has_last_norm:
            self.layernorm = LayerNorm(device, dtype, config.hidden_size, config.eps)

    def slices(self, pixels: Tensor) -> Slices[Tensor]:
        """[B, 3, height, width] -> [B, patches, size]."""
        x = yield from through(self.layers, self.embeddings.forward(pixels))
        return (x if self.layernorm is None else self.layernorm.forward(x))[:, 1:]


class TileProjector(Layer):
    """From the tower's vectors to embeddings of the text model."""

    def __init__(self, device: Device, dtype: torch.dtype, config: InternVlEncoder) -> None:
        self.merge = config.merge_size
        self.activation = config.projector_activation
        merged, out = config.hidden_size * self.merge**2, config.output_size
        self.layer_norm = LayerNorm(device, dtype, merged, PROJECTOR_EPS)
        self.linear_1 = ReplicatedLinear(device, dtype, merged, out, bias=True)
        self.linear_2 = ReplicatedLinear(device, dtype, out, out, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, patches, tower's size] -> [B, patches / merge^2, text model's size]."""
        joined = self.layer_norm.forward(join_squares(x, self.merge))
        return self.linear_2.forward(activate(self.activation, self.linear_1.forward(joined)))


class InternVl(Layer):
    """See MediaEncoder."""

    def __init__(self, device: Device, dtype: torch.dtype, config: InternVlEncoder) -> None:
        self.torch_device, self.dtype = device.torch_device, dtype
        self.output_size = config.output_size
        self.renames: Renames = RENAMES if config.authors is None else AUTHORS_RENAMES
        self.vision_tower = TileTower(device, dtype, config)
        self.multi_modal_projector = TileProjector(device, dtype, config)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """The rows [num_rows, hidden] of each image; all have equally many tiles, float32
        [tiles, 3, size, size]."""
        count, *shape = media[0].shape
        pixels = upload(np.concatenate([one.values for one in media]), self.torch_device)
        x = yield from self.vision_tower.slices(pixels.view(len(media) * count, *shape).to(self.dtype))
        return list(self.multi_modal_projector.forward(x).reshape(len(media), -1, self.output_size))

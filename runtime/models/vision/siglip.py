"""The encoders of DeepSeek-VL, Aya Vision, Command A Vision, Idefics 3 and SmolVLM: a SigLIP vision tower
(Zhai et al., 2023) over square tiles of an image, and a connector to the text model.

Every rank has all of its weights.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from runtime.devices.base import Device
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.renames import Renames
from runtime.models.config.siglip_config import SiglipEncoder
from runtime.models.vision.gemma_vision import SiglipEmbeddings, SiglipVisionTower
from runtime.models.vision.patches import join_squares, nearest
from runtime.models.vision.slices import Slices


class NearestEmbeddings(SiglipEmbeddings):
    """Patches as vectors, with those positions of the table that are nearest to theirs, as Idefics 3 finds
    them: between whole numbers float32 decides, by which a patch may have its neighbour's."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: ClipTower) -> None:
        super().__init__(device, dtype, tower)
        side = tower.image_size // tower.patch_size
        found = nearest(torch.arange(side).float() * (1.0 / torch.tensor(side)), side)
        self.places = (found[:, None] * side + found).flatten().to(device.torch_device)

    def positions(self) -> Tensor:
        """See SiglipEmbeddings."""
        return self.position_embedding.forward(self.places)


class SiglipConnector(Layer):
    """From the tower's vectors to embeddings of the text model."""

    def __init__(self, device: Device, dtype: torch.dtype, config: SiglipEncoder) -> None:
        merged, inner, out = config.merged_size, config.inner_size, config.output_size
        self.merge, self.kind = config.merge_size, config.connector
        self.layernorm: LayerNorm | None = None
        self.linear_2: ReplicatedLinear | None = None
        if config.merger_eps is not None:
            self.layernorm = LayerNorm(device, dtype, merged, config.merger_eps)
        if self.kind == "linear":
            self.linear_1 = ReplicatedLinear(device, dtype, merged, out, bias=False)
            return
        second = inner // 2 if self.kind == "gated" else inner
        self.linear_1 = ReplicatedLinear(device, dtype, merged, inner, bias=True)
        self.linear_2 = ReplicatedLinear(device, dtype, second, out, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, patches, tower's size] -> [B, patches / merge^2, text model's size]."""
        if self.merge > 1:
            x = join_squares(x, self.merge)
        if self.layernorm is not None:
            x = self.layernorm.forward(x)
        x = self.linear_1.forward(x)
        if self.linear_2 is None:
            return x
        if self.kind == "mlp":
            return self.linear_2.forward(gelu(x))
        up, gate = x.chunk(2, dim=-1)
        return self.linear_2.forward(silu(gate) * up)


class Siglip(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("vision_model.", "vision_tower."),
        ("vision_tower.vision_tower.", "vision_tower."),
        ("vision_tower.encoder.layers.", "vision_tower.layers."),
        ("vision_tower.", "media_encoder.vision_tower."),
        ("aligner.linear1.", "media_encoder.connector.linear_1."),
        ("aligner.linear2.", "media_encoder.connector.linear_2."),
        ("connector.modality_projection.proj.", "media_encoder.connector.linear_1."),
        ("multi_modal_projector.", "media_encoder.connector."),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: SiglipEncoder) -> None:
        self.torch_device, self.dtype = device.torch_device, dtype
        self.output_size = config.output_size
        self.vision_tower = SiglipVisionTower(device, dtype, config.tower, has_last_norm=config.has_last_norm)
        if config.has_nearest_positions:
            self.vision_tower.embeddings = NearestEmbeddings(device, dtype, config.tower)
        self.connector = SiglipConnector(device, dtype, config)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """The rows [num_rows, hidden] of each image; all have equally many tiles, float32
        [tiles, 3, size, size]."""
        count, *shape = media[0].shape
        pixels = upload(np.concatenate([one.values for one in media]), self.torch_device)
        x = yield from self.vision_tower.slices(pixels.view(len(media) * count, *shape).to(self.dtype))
        return list(self.connector.forward(x).reshape(len(media), -1, self.output_size))

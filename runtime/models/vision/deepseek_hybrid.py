"""The encoder of DeepSeek-VL 7B (Lu et al., 2024): SigLIP over a small version of an image and SAM over a
large one, of which the output and that of a layer in the middle are taken.

Every rank has all of its weights.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, interpolate

from runtime.devices.base import Device
from runtime.layers.parallel.replicated import ReplicatedLinear, replicated_weight
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.deepseek_hybrid_config import DeepSeekHybridEncoder
from runtime.models.config.renames import Renames
from runtime.models.vision.gemma_vision import SiglipVisionTower
from runtime.models.vision.sam import Sam, SamDown, SamNeck, channels_first
from runtime.models.vision.slices import Slices, layer_work, within


class HybridAligner(Layer):
    """From the vectors of both towers to embeddings of the text model."""

    def __init__(self, device: Device, dtype: torch.dtype, config: DeepSeekHybridEncoder) -> None:
        size, large, out = config.tower.hidden_size, config.sam.channels[2], config.output_size
        self.vision_proj = ReplicatedLinear(device, dtype, size, out // 2, bias=True)
        self.high_res_vision_proj = ReplicatedLinear(device, dtype, large, out // 2, bias=True)
        self.proj = ReplicatedLinear(device, dtype, out, out, bias=True)

    def forward(self, x: Tensor, large: Tensor) -> Tensor:
        """[B, rows, SigLIP's size], [B, rows, last channels of SAM's] -> [B, rows, text model's size]."""
        parts = self.high_res_vision_proj.forward(large), self.vision_proj.forward(x)
        return self.proj.forward(gelu(torch.cat(parts, dim=-1)))


class DeepSeekHybrid(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("high_res_vision_model.vision_encoder.", "media_encoder.sam."),
        ("patch_embed.projection.", "patch_embed."),
        (".mlp.lin", ".lin"),
        ("high_res_vision_neck.", "media_encoder.neck."),
        ("high_res_vision_proj.conv", "media_encoder.down.conv"),
        ("high_res_vision_alpha", "media_encoder.alpha"),
        ("vision_model.vision_model.", "vision_model."),
        ("vision_model.encoder.layers.", "vision_model.layers."),
        ("vision_model.", "media_encoder.vision_tower."),
        ("aligner.", "media_encoder.aligner."),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: DeepSeekHybridEncoder) -> None:
        self.torch_device, self.dtype, self.config = device.torch_device, dtype, config
        self.output_size, self.taken = config.output_size, min(config.sam.global_layers)
        self.vision_tower = SiglipVisionTower(device, dtype, config.tower)
        self.sam = Sam(device, dtype, config.sam)
        self.neck = SamNeck(device, dtype, config.sam)
        self.down = SamDown(device, dtype, config.sam)
        self.alpha = replicated_weight(device, dtype, 1)
        self.aligner = HybridAligner(device, dtype, config)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """The rows [num_rows, hidden] of each image, float32 [N]: its pixels [3, height, width] for
        SAM, then those for SigLIP."""
        large, small = self._sizes
        values = upload(np.concatenate([one.values for one in media]), self.torch_device)
        parts = values.view(len(media), -1).to(self.dtype).split((3 * large**2, 3 * small**2), dim=1)
        split = self._part_of_sam
        sam = self.sam.slices(parts[0].reshape(-1, 3, large, large), self.taken)
        picture, taken = yield from within(sam, 0.0, split)
        rows = self._shrunk(picture) + self._shrunk(self.neck.forward(taken)) * self.alpha.tensor
        siglip = self.vision_tower.slices(parts[1].reshape(-1, 3, small, small))
        x = yield from within(siglip, split, 1.0)
        return list(self.aligner.forward(x, rows))

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.config.sam.image_size, self.config.tower.image_size

    @property
    def _part_of_sam(self) -> float:
        """The part of the work that SAM's tower does."""
        tower, side = self.config.tower, self.config.sam.image_size // self.config.sam.patch_size
        sam = sum(self.sam.works(side, side))
        count = self.config.side**2
        return sam / (sam + tower.num_layers * layer_work(count, tower.hidden_size, count))

    def _shrunk(self, picture: Tensor) -> Tensor:
        """[B, rows, columns, channels] -> one vector for each patch of SigLIP, [B, rows, last channels]."""
        size = (4 * self.config.side,) * 2
        return self.down.forward(
            interpolate(channels_first(picture), size=size, mode="bilinear", align_corners=False)
        )

"""The encoder of LLaVA 1.5 (Liu et al., 2023): a CLIP vision tower, and a projector of two linear layers."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.media_config import LlavaEncoder
from runtime.models.config.onevision_config import OneVisionEncoder
from runtime.models.config.renames import Renames
from runtime.models.vision.activations import activate
from runtime.models.vision.clip import ClipVisionTower
from runtime.models.vision.slices import Slices


class Projector(Layer):
    """From the tower's vectors to embeddings of the text model."""

    def __init__(self, device: Device, dtype: torch.dtype, config: LlavaEncoder | OneVisionEncoder) -> None:
        self.activation = config.activation
        sizes = config.tower.hidden_size, config.output_size
        self.linear_1 = ReplicatedLinear(device, dtype, *sizes, bias=config.has_bias)
        self.linear_2 = ReplicatedLinear(device, dtype, sizes[1], sizes[1], bias=config.has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., tower's size] -> [..., text model's size]."""
        return self.linear_2.forward(activate(self.activation, self.linear_1.forward(x)))


class Llava(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("vision_tower.vision_model.", "vision_tower."),
        ("vision_tower.encoder.layers.", "vision_tower.layers."),
        ("vision_tower.", "media_encoder.vision_tower."),
        ("multi_modal_projector.", "media_encoder.multi_modal_projector."),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: LlavaEncoder) -> None:
        self.torch_device, self.dtype = device.torch_device, dtype
        self.output_size = config.output_size
        self.image_size, self.keeps_class = config.tower.image_size, config.keeps_class
        self.vision_tower = ClipVisionTower(device, dtype, config.tower)
        self.multi_modal_projector = Projector(device, dtype, config)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """Of each image, float32 [3, image_size, image_size], its rows [num_rows, hidden]."""
        shape = len(media), 3, self.image_size, self.image_size
        pixels = upload(np.concatenate([one.values for one in media]), self.torch_device)
        x = yield from self.vision_tower.slices(pixels.view(shape).to(self.dtype))
        return list(self.multi_modal_projector.forward(x if self.keeps_class else x[:, 1:]))

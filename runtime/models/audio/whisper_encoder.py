"""The encoder of Whisper, whose output the decoder attends to as it is."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.norm import LayerNorm
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.audio.whisper import EPS, WhisperTower
from runtime.models.config.renames import Renames
from runtime.models.config.whisper_config import WhisperEncoder
from runtime.models.vision.slices import Slices


class WholeSoundEncoder(Layer):
    """See MediaEncoder. A sound has one row, with the numbers of all its positions."""

    renames: Renames = ()  # models/whisper.py names the tensors

    def __init__(self, device: Device, dtype: torch.dtype, config: WhisperEncoder) -> None:
        self.torch_device, self.dtype = device.torch_device, dtype
        self.output_size, self.num_positions = config.output_size, config.num_positions
        self.tower = WhisperTower(device, dtype, config)
        self.norm = LayerNorm(device, dtype, config.hidden_size, EPS)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """The row [1, positions * hidden] of each sound, float32 [mels, frames]."""
        values = upload(np.concatenate([one.values for one in media]), self.torch_device)
        mels = values.view(len(media), *media[0].shape).to(self.dtype)
        x = yield from self.tower.slices(mels, self.num_positions)
        return list(self.norm.forward(x).reshape(len(media), 1, -1))

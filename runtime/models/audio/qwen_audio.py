"""The encoder of Qwen2-Audio (Chu et al., 2024): Whisper's tower, whose positions are averaged in pairs and
projected."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from runtime.devices.base import Device
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.audio.whisper import EPS, WhisperTower
from runtime.models.config.audio_config import POOLED, QwenAudioEncoder, num_positions
from runtime.models.config.renames import Renames
from runtime.models.vision.slices import Slices


class QwenAudio(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("audio_tower.layer_norm.", "media_encoder.norm."),
        ("audio_tower.", "media_encoder.tower."),
        ("multi_modal_projector.linear.", "media_encoder.projector."),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: QwenAudioEncoder) -> None:
        self.torch_device, self.dtype = device.torch_device, dtype
        self.output_size = config.output_size
        self.tower = WhisperTower(device, dtype, config)
        self.norm = LayerNorm(device, dtype, config.hidden_size, EPS)
        self.projector = ReplicatedLinear(device, dtype, config.hidden_size, config.output_size, bias=True)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """Spectrograms of sounds, float32 [mels, frames] each -> of each its embeddings, [rows, hidden].
        `grid` of a sound begins with how many of the frames are its own; the others are silence behind it."""
        mels = upload(np.concatenate([one.values for one in media]), self.torch_device)
        x = yield from self.tower.slices(
            mels.view(len(media), *media[0].shape).to(self.dtype), num_positions(media[0].grid[0])
        )
        pooled = avg_pool1d(x.transpose(1, 2), POOLED).transpose(1, 2)
        return list(self.projector.forward(self.norm.forward(pooled)))

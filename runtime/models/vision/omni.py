"""The encoders of Qwen2.5-Omni and Qwen3-Omni: those of Qwen2.5-VL and Qwen3-VL, and one of sounds."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.devices.base import Device
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.audio.omni_audio import PartTower, WindowTower
from runtime.models.config.omni_config import OmniEncoder
from runtime.models.config.qwen3_vl_config import Qwen3VlEncoder
from runtime.models.config.renames import Renames
from runtime.models.vision.qwen3_vl import Qwen3Vl
from runtime.models.vision.qwen_vl import QwenVl
from runtime.models.vision.slices import Slices

SOUND_DIMENSIONS = 2  # of a spectrogram; patches have more
PARTS: Renames = (("visual.", "media_encoder.vision."), ("audio_tower.", "media_encoder.audio."))
RENAMES_25: Renames = (
    (".merger.mlp.0.", ".merger.fc1."),
    (".merger.mlp.2.", ".merger.fc2."),
    (".attn.q.", ".attn.q_proj."),
    (".attn.k.", ".attn.k_proj."),
    (".attn.v.", ".attn.v_proj."),
    *PARTS,
)
RENAMES_3: Renames = (
    ("visual.merger_list.", "visual.deepstack_merger_list."),
    (".ln_q.", ".norm."),
    (".mlp.0.", ".fc1."),
    (".mlp.2.", ".fc2."),
    (".linear_fc1.", ".fc1."),
    (".linear_fc2.", ".fc2."),
    *PARTS,
)


class Omni(Layer):
    """See MediaEncoder."""

    def __init__(self, device: Device, dtype: torch.dtype, config: OmniEncoder) -> None:
        self.torch_device, self.dtype = device.torch_device, dtype
        self.output_size = config.output_size
        self.vision: QwenVl | Qwen3Vl
        self.audio: PartTower | WindowTower
        self.renames: Renames
        if isinstance(config.vision, Qwen3VlEncoder):
            self.renames = RENAMES_3
            self.vision = Qwen3Vl(device, dtype, config.vision)
            self.audio = WindowTower(device, dtype, config.audio)
        else:
            self.renames = RENAMES_25
            self.vision = QwenVl(device, dtype, config.vision)
            self.audio = PartTower(device, dtype, config.audio)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """Images and videos as the encoder of images; spectrograms of sounds, float32 [mels, frames], all of
        one length -> of each its rows, [rows, output size]. What rows of images add behind the text model's
        first layers is zero in those of sounds."""
        if len(media[0].shape) != SOUND_DIMENSIONS:
            return (yield from self.vision.slices(media))
        mels = upload(np.concatenate([one.values for one in media]), self.torch_device)
        rows = yield from self.audio.slices(mels.view(len(media), *media[0].shape).to(self.dtype))
        return list(pad(rows, (0, self.output_size - rows.shape[-1])))

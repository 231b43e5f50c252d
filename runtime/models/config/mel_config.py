"""preprocessor_config.json of models that take sounds as mel spectrograms. Torch-free."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.models.config.audio_config import QwenAudioEncoder
from runtime.models.config.image_config import read_processor_fields
from runtime.models.config.omni_config import OmniAudio
from runtime.models.config.whisper_config import WhisperEncoder

Size = Annotated[int, Meta(ge=1, le=1 << 16)]


class MelConfig(Struct, frozen=True, kw_only=True):
    """How sounds become spectrograms, with the defaults of Whisper's feature extractor."""

    feature_size: Size = 80  # mel bins
    sampling_rate: Annotated[int, Meta(ge=1000, le=768_000)] = 16000  # samples a second
    hop_length: Size = 160  # samples from one frame to the next
    n_fft: Annotated[int, Meta(ge=2, le=1 << 16)] = 400  # samples of a frame
    chunk_length: Annotated[int, Meta(ge=1, le=3600)] = 30  # seconds of the longest sound
    dither: float = 0.0
    padding_value: float = 0.0

    @property
    def num_samples(self) -> int:
        """Samples of the longest sound."""
        return self.chunk_length * self.sampling_rate

    @property
    def max_frames(self) -> int:
        """Frames of the longest sound."""
        return self.num_samples // self.hop_length

    @property
    def digest_text(self) -> bytes:
        """What tells prepared sounds of one file apart."""
        return msgspec.json.encode(self)


def read_mel_config(folder: Path, encoder: QwenAudioEncoder | OmniAudio | WhisperEncoder) -> MelConfig:
    """How the sounds of the model in this folder are prepared for its encoder. Raises ModelError."""
    config, name = read_processor_fields(folder, MelConfig, "feature_extractor")
    if config.dither or config.padding_value:
        raise ModelError(f"{name}: dither and padding_value are supported as 0 alone; set both to 0")
    if config.num_samples <= config.n_fft:
        raise ModelError(
            f"{name}: a chunk_length of {config.chunk_length} s is shorter than n_fft; restore the file from "
            "the model's source"
        )
    for field, found, expected in (
        ("feature_size", config.feature_size, encoder.num_mels),
        ("number of frames", config.max_frames, encoder.max_frames),
    ):
        if expected is not None and found != expected:
            raise ModelError(
                f"{name} has a {field} of {found}, and config.json one of {expected}; restore "
                "both from the model's source"
            )
    return config

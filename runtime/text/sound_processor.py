"""Sounds as Whisper's tower takes them: mel spectrograms."""

from hashlib import sha256

import numpy as np

from runtime.errors import InvalidRequest
from runtime.messages.media import Media, MediaKind
from runtime.models.config.audio_config import QwenAudioEncoder, num_rows
from runtime.models.config.mel_config import MelConfig
from runtime.text.media_prompts import Prepared, SoundLimits, check_kind
from runtime.text.mel import log_mels

MARGIN = 2  # frames behind a sound's end that its last position sees through both convolutions


class SoundProcessor:
    """Prepares sounds for QwenAudioEncoder; see MediaProcessor. Each is as many tokens as the encoder makes
    rows."""

    def __init__(self, encoder: QwenAudioEncoder, config: MelConfig) -> None:
        self.placeholder_ids = {MediaKind.AUDIO: encoder.placeholder_id}
        self.sounds = SoundLimits(rate=config.sampling_rate, max_s=float(config.chunk_length))
        self._kinds = encoder.kinds
        self._config = config

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [mels, frames]: the frames that the sound's rows depend on.
        The grid counts the frames of the sound itself."""
        check_kind(media, self._kinds)
        config, count = self._config, len(media.values)
        if media.rate != config.sampling_rate or count > config.num_samples:
            raise InvalidRequest(
                f"{media.param}: the model takes {config.sampling_rate} samples a second for up to "
                f"{config.chunk_length} s, and the sound has {count} at {media.rate:g} a second; send it in "
                "parts",
                param=media.param,
            )
        frames = min(-(-count // config.hop_length), config.max_frames)
        rows = num_rows(frames)
        if not rows:
            raise InvalidRequest(
                f"{media.param}: {count} samples are too short for the model; send a longer sound",
                param=media.param,
            )
        return Prepared(
            kind=MediaKind.AUDIO,
            digest=sha256(media.digest + config.digest_text).digest(),
            values=log_mels(media.values, config, min(frames + MARGIN, config.max_frames)),
            token_ids=[self.placeholder_ids[MediaKind.AUDIO]] * rows,
            positions=np.arange(rows, dtype=np.int32),
            grid=(frames, 1, 1),
        )

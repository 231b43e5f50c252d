"""Sounds as Whisper's tower takes them: mel spectrograms."""

from hashlib import sha256

import numpy as np

from runtime.errors import InvalidRequest
from runtime.messages.media import Media, MediaKind, SoundLimits
from runtime.models.config.audio_config import QwenAudioEncoder, num_rows
from runtime.models.config.mel_config import MelConfig
from runtime.models.config.whisper_config import WhisperEncoder
from runtime.text.media_prompts import Prepared, check_kind
from runtime.text.mel import log_mels

MARGIN = 2  # frames behind a sound's end that its last position sees through both convolutions


class SoundProcessor:
    """Prepares sounds for QwenAudioEncoder; see MediaProcessor. Each is as many tokens as the encoder makes
    rows."""

    is_attended = False

    def __init__(self, encoder: QwenAudioEncoder, config: MelConfig) -> None:
        self.placeholder_ids = {MediaKind.AUDIO: encoder.placeholder_id}
        self.sounds = SoundLimits(rate=config.sampling_rate, max_s=float(config.chunk_length))
        self._kinds = encoder.kinds
        self._config = config

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [mels, frames]: the frames that the sound's rows depend on.
        The grid counts the frames of the sound itself."""
        config = self._config
        count = checked_samples(media, config, self._kinds)
        frames = min(-(-count // config.hop_length), config.max_frames)
        rows = num_rows(frames)
        if not rows:
            raise too_short(media)
        return Prepared(
            kind=MediaKind.AUDIO,
            digest=sha256(media.digest + config.digest_text).digest(),
            values=log_mels(media.values, config, min(frames + MARGIN, config.max_frames)),
            token_ids=[self.placeholder_ids[MediaKind.AUDIO]] * rows,
            positions=np.arange(rows, dtype=np.int32),
            grid=(frames, 1, 1),
        )


class WholeSoundProcessor:
    """Prepares sounds for WhisperEncoder; see MediaProcessor. Silence follows a sound up to the greatest
    length, and counts as a part of it."""

    is_attended = True

    def __init__(self, encoder: WhisperEncoder, config: MelConfig) -> None:
        self.placeholder_ids = {MediaKind.AUDIO: encoder.placeholder_id}
        self.sounds = SoundLimits(
            rate=config.sampling_rate,
            max_s=float(config.chunk_length),
            is_cut=True,
            hop_length=config.hop_length,
        )
        self._kinds = encoder.kinds
        self._config = config

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [mels, frames]; the first token takes the one row."""
        config = self._config
        checked_samples(media, config, self._kinds)
        return Prepared(
            kind=MediaKind.AUDIO,
            digest=sha256(media.digest + config.digest_text).digest(),
            values=log_mels(media.values, config, config.max_frames),
            token_ids=[],
            positions=np.zeros(1, np.int32),
        )


def too_short(media: Media) -> InvalidRequest:
    """The error for a sound that has no row."""
    return InvalidRequest(
        f"{media.param}: {len(media.values)} samples are too short for the model; send a longer sound",
        param=media.param,
    )


def checked_samples(
    media: Media, config: MelConfig, kinds: frozenset[MediaKind], max_s: float | None = None
) -> int:
    """How many samples a sound has. `max_s`: seconds of the longest; None: as `config` says. Raises
    InvalidRequest for what is none, has another rate, or is too long."""
    check_kind(media, kinds)
    count, max_s = len(media.values), config.chunk_length if max_s is None else max_s
    if media.rate != config.sampling_rate or count > max_s * config.sampling_rate:
        raise InvalidRequest(
            f"{media.param}: the model takes {config.sampling_rate} samples a second for up to "
            f"{max_s:g} s, and the sound has {count} at {media.rate:g} a second; send it in "
            "parts",
            param=media.param,
        )
    return count

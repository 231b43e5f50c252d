"""Images, videos and sounds as Qwen2.5-Omni and Qwen3-Omni take them."""

from hashlib import sha256

import numpy as np

from runtime.errors import InvalidRequest
from runtime.messages.media import Media, MediaKind, SoundLimits
from runtime.models.config.mel_config import MelConfig
from runtime.models.config.omni_config import OmniEncoder
from runtime.text.media_prompts import Prepared
from runtime.text.mel import log_mels
from runtime.text.patch_image_processor import PatchImageProcessor
from runtime.text.sound_processor import MARGIN, checked_samples, too_short
from runtime.text.video_sound import SoundMarks, with_sound

LONGEST_S = 1800.0  # seconds of a sound, where the model names no bound
SOUNDS = frozenset({MediaKind.AUDIO})


class OmniProcessor:
    """Prepares files for OmniEncoder; see MediaProcessor."""

    is_attended = False

    def __init__(
        self, encoder: OmniEncoder, patches: PatchImageProcessor, mels: MelConfig, marks: SoundMarks | None
    ) -> None:
        """`patches`: prepares images and videos; `marks`: of sounds in videos, None: such are refused."""
        self._encoder, self._patches, self._mels, self._marks = encoder, patches, mels, marks
        self.placeholder_ids = {**patches.placeholder_ids, MediaKind.AUDIO: encoder.audio_placeholder_id}
        # Qwen3-Omni looks at a sound as it is, Qwen2.5-Omni at one with silence up to the longest
        self._ends = encoder.audio.num_channels > 0
        longest_s = LONGEST_S if self._ends else float(mels.chunk_length)
        self.sounds = SoundLimits(rate=mels.sampling_rate, max_s=longest_s)

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values of sounds are float32 [mels, frames], others as those of `patches`."""
        if media.kind is MediaKind.AUDIO:
            return self._sound(media)
        prepared = self._patches.prepare(media)
        if media.sound is None:
            return prepared
        if self._marks is None:
            raise InvalidRequest(
                f"{media.param}: the tokenizer has no tokens around sounds (audio_bos_token, "
                "audio_eos_token), so those of videos are not possible; leave use_audio_in_video out",
                param="mm_processor_kwargs.use_audio_in_video",
            )
        return with_sound(prepared, self._sound(media.sound), self._marks)

    def _sound(self, media: Media) -> Prepared:
        config = self._mels
        count = checked_samples(media, config, SOUNDS, self.sounds.max_s)
        frames = count // config.hop_length if self._ends else -(-count // config.hop_length)
        rows = self._encoder.audio.num_rows(frames)
        if not rows or (self._ends and count <= config.n_fft // 2):
            raise too_short(media)
        computed = frames if self._ends else min(frames + MARGIN, config.max_frames)
        values = log_mels(media.values, config, computed, ends=self._ends)[:, :frames]
        return Prepared(
            kind=MediaKind.AUDIO,
            digest=sha256(media.digest + config.digest_text).digest(),
            values=np.ascontiguousarray(values),
            token_ids=[self.placeholder_ids[MediaKind.AUDIO]] * rows,
            positions=np.arange(rows, dtype=np.int32),
            grid=(frames, 1, 1),
        )

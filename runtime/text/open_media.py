"""What prepares a model's images or sounds, by its encoder."""

from functools import partial
from pathlib import Path

from runtime.errors import ModelError
from runtime.messages.media import TranscriptionFacts
from runtime.models.config.audio_config import QwenAudioEncoder
from runtime.models.config.dual_config import DualImages, read_dual_images
from runtime.models.config.gemma_vision_config import Gemma3Encoder
from runtime.models.config.image_config import read_image_config
from runtime.models.config.internvl_config import InternVlEncoder
from runtime.models.config.media_config import LlavaEncoder, MediaConfig
from runtime.models.config.mel_config import read_mel_config
from runtime.models.config.onevision_config import OneVisionEncoder
from runtime.models.config.patch_image_config import read_patch_images, read_patch_videos
from runtime.models.config.pixtral_config import PixtralEncoder
from runtime.models.config.qwen_vl_config import QwenVlEncoder
from runtime.models.config.row_image_config import read_marks, read_row_images
from runtime.models.config.tile_image_config import read_tile_images
from runtime.models.config.whisper_config import WhisperEncoder, read_whisper_generation
from runtime.text.marker_tokens import marker_id
from runtime.text.media_prompts import MediaProcessor
from runtime.text.sound_processor import SoundProcessor, WholeSoundProcessor
from runtime.text.vocabulary import Vocabulary


def open_processor(
    folder: Path, encoder: MediaConfig | None, vocabulary: Vocabulary
) -> MediaProcessor | None:
    """What prepares images or sounds for `encoder`, as the model's folder says; None: the model takes text
    alone. Raises ModelError."""
    if encoder is None:
        return None
    encode = partial(vocabulary.encode, add_special=False)
    if isinstance(encoder, QwenAudioEncoder):
        return SoundProcessor(encoder, read_mel_config(folder, encoder))
    if isinstance(encoder, WhisperEncoder):
        return WholeSoundProcessor(encoder, read_mel_config(folder, encoder))
    # Pillow is imported for models that take images only
    try:
        from runtime.text.gemma_image_processor import GemmaImageProcessor, read_gemma_images
        from runtime.text.image_openers import open_images
        from runtime.text.image_processor import ClipImageProcessor
        from runtime.text.onevision_processor import OneVisionProcessor, read_tiles
        from runtime.text.patch_image_processor import PatchImageProcessor
        from runtime.text.row_image_processor import RowImageProcessor
        from runtime.text.tile_image_processor import TileImageProcessor
    except ModuleNotFoundError:
        raise ModelError(
            "the model takes images, which Pillow prepares, and it is not installed; run pip install "
            "pillow, or set --enable-multimodal false to serve text alone"
        ) from None

    match encoder:
        case Gemma3Encoder():
            return GemmaImageProcessor(encoder, read_gemma_images(folder), encode)
        case OneVisionEncoder():
            return OneVisionProcessor(encoder, read_tiles(folder, encoder))
        case LlavaEncoder():
            return ClipImageProcessor(encoder, read_image_config(folder))
        case DualImages():
            return ClipImageProcessor(encoder, read_dual_images(folder, encoder))
        case InternVlEncoder():
            marks = [
                marker_id(vocabulary, vocabulary.files.special_tokens.get(name, default))
                for name, default in (("start_image_token", "<img>"), ("end_image_token", "</img>"))
            ]
            return TileImageProcessor(
                encoder, read_tile_images(folder, encoder.image_size), (marks[0], marks[1])
            )
        case PixtralEncoder():
            texts = read_marks(folder)
            break_id, end_id = (
                marker_id(vocabulary, text) for text in (texts.image_break_token, texts.image_end_token)
            )
            return RowImageProcessor(encoder, read_row_images(folder, encoder), break_id, end_id)
        case QwenVlEncoder():
            images = read_patch_images(folder, encoder)
            videos = read_patch_videos(folder, encoder, images)
            return PatchImageProcessor(encoder, images, videos, encode)
        case _:
            return open_images(folder, encoder, vocabulary)


def open_transcription(folder: Path, processor: MediaProcessor | None) -> TranscriptionFacts | None:
    """How the model in this folder transcribes; None: it does not. Raises ModelError."""
    sounds = None if processor is None else processor.sounds
    if sounds is None or not sounds.is_cut:
        return None
    generation = read_whisper_generation(folder)
    return TranscriptionFacts(
        rate=sounds.rate,
        longest_s=sounds.max_s,
        suppressed=tuple([id for id in generation.suppress_tokens or () if id >= 0]),
        has_languages=generation.is_multilingual,
    )

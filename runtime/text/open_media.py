"""What prepares a model's images or sounds, by its encoder."""

from collections.abc import Callable
from pathlib import Path

from runtime.errors import ModelError
from runtime.models.config.audio_config import QwenAudioEncoder
from runtime.models.config.gemma_vision_config import Gemma3Encoder
from runtime.models.config.image_config import read_image_config
from runtime.models.config.media_config import LlavaEncoder, MediaConfig
from runtime.models.config.mel_config import read_mel_config
from runtime.models.config.onevision_config import OneVisionEncoder
from runtime.models.config.patch_image_config import read_patch_images, read_patch_videos
from runtime.models.config.qwen_vl_config import QwenVlEncoder
from runtime.text.media_prompts import MediaProcessor
from runtime.text.sound_processor import SoundProcessor


def open_processor(
    folder: Path, encoder: MediaConfig | None, encode: Callable[[str], list[int]]
) -> MediaProcessor | None:
    """What prepares images or sounds for `encoder`, as the model's folder says; None: the model takes text
    alone. `encode`: makes tokens of text. Raises ModelError."""
    if encoder is None:
        return None
    if isinstance(encoder, QwenAudioEncoder):
        return SoundProcessor(encoder, read_mel_config(folder, encoder))
    # Pillow is imported for models that take images only
    try:
        from runtime.text.gemma_image_processor import GemmaImageProcessor, read_gemma_images
        from runtime.text.image_processor import ClipImageProcessor
        from runtime.text.onevision_processor import OneVisionProcessor, read_tiles
        from runtime.text.patch_image_processor import PatchImageProcessor
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
        case QwenVlEncoder():
            images = read_patch_images(folder, encoder)
            videos = read_patch_videos(folder, encoder, images)
            return PatchImageProcessor(encoder, images, videos, encode)

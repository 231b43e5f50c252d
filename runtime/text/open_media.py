"""What prepares a model's images or sounds, by its encoder."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from runtime.errors import ModelError
from runtime.messages.media import AlignmentFacts, MediaKind, TranscriptionFacts
from runtime.models.config.audio_config import STRIDE, QwenAudioEncoder
from runtime.models.config.dual_config import DualImages
from runtime.models.config.gemma_vision_config import Gemma3Encoder
from runtime.models.config.image_config import read_image_config
from runtime.models.config.internvl_config import InternVlEncoder
from runtime.models.config.media_config import LlavaEncoder, MediaConfig
from runtime.models.config.mel_config import read_mel_config
from runtime.models.config.omni_config import OmniEncoder
from runtime.models.config.onevision_config import OneVisionEncoder
from runtime.models.config.patch_image_config import (
    OF_THE_FILES,
    PixelRange,
    read_patch_images,
    read_patch_videos,
)
from runtime.models.config.pixtral_config import PixtralEncoder
from runtime.models.config.qwen_vl_config import QwenVlEncoder
from runtime.models.config.row_image_config import read_marks, read_row_images
from runtime.models.config.tile_image_config import read_internvl_tiles
from runtime.models.config.transformers_media import TransformersEncoder
from runtime.models.config.whisper_config import WhisperEncoder, read_filter_width, read_whisper_generation
from runtime.text.marker_tokens import marker_id
from runtime.text.media_prompts import MediaProcessor
from runtime.text.prefix_processor import open_transformers_media
from runtime.text.sound_processor import SoundProcessor, WholeSoundProcessor
from runtime.text.video_sound import SoundMarks
from runtime.text.vocabulary import Vocabulary

NO_PIXELS: Mapping[MediaKind, PixelRange] = {}
# stands for a video in InternVL's authors' layout, whose tokenizers have it of Qwen 2.5 and no text uses it
AUTHORS_VIDEO = "<|video_pad|>"
# names in the tokenizer's files of the tokens around a sound, and their texts in Qwen3-Omni
SOUND_MARKS = (("audio_bos_token", "<|audio_start|>"), ("audio_eos_token", "<|audio_end|>"))


def open_processor(
    folder: Path,
    encoder: MediaConfig | None,
    vocabulary: Vocabulary,
    pixels: Mapping[MediaKind, PixelRange] = NO_PIXELS,
) -> MediaProcessor | None:
    """What prepares images or sounds for `encoder`, as the model's folder says, and `pixels` of the images
    and frames of models that take any size; None: the model takes text alone. Raises ModelError."""
    if encoder is None:
        return None
    of_images, of_frames = (pixels.get(kind, OF_THE_FILES) for kind in (MediaKind.IMAGE, MediaKind.VIDEO))
    _check_ranges(encoder, of_images, of_frames)
    encode = partial(vocabulary.encode, add_special=False)
    if isinstance(encoder, TransformersEncoder):
        return open_transformers_media(folder, encoder, vocabulary)
    if isinstance(encoder, QwenAudioEncoder):
        return SoundProcessor(encoder, read_mel_config(folder, encoder))
    if isinstance(encoder, WhisperEncoder):
        return WholeSoundProcessor(encoder, read_mel_config(folder, encoder))
    # Pillow is imported for models that take images only
    try:
        from runtime.text.gemma_image_processor import GemmaImageProcessor, read_gemma_images
        from runtime.text.image_openers import open_images
        from runtime.text.image_processor import ClipImageProcessor
        from runtime.text.naflex_images import open_dual_images
        from runtime.text.omni_processor import OmniProcessor
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
            return open_dual_images(folder, encoder)
        case InternVlEncoder():
            places, marks = tile_placeholders(encoder, vocabulary), tile_marks(vocabulary)
            return TileImageProcessor(encoder, read_internvl_tiles(folder, encoder), marks, places, encode)
        case PixtralEncoder():
            texts = read_marks(folder)
            names = texts.image_break_token, texts.image_end_token
            break_id, end_id = (marker_id(vocabulary, text) for text in names)
            return RowImageProcessor(encoder, read_row_images(folder, encoder), break_id, end_id)
        case OmniEncoder(vision=vision):
            images = read_patch_images(folder, vision, of_images)
            videos = read_patch_videos(folder, vision, images, of_frames)
            patches = PatchImageProcessor(vision, images, videos, encode)
            mels = read_mel_config(folder, encoder.audio)
            return OmniProcessor(encoder, patches, mels, sound_marks(encoder, vocabulary))
        case QwenVlEncoder():
            images = read_patch_images(folder, encoder, of_images)
            videos = read_patch_videos(folder, encoder, images, of_frames)
            return PatchImageProcessor(encoder, images, videos, encode)
        case _:
            return open_images(folder, encoder, vocabulary)


def _check_ranges(encoder: MediaConfig, *ranges: PixelRange) -> None:
    """Raises ModelError for ranges of pixels where a model's images have sizes of their own."""
    if not isinstance(encoder, QwenVlEncoder | OmniEncoder) and set(ranges) != {OF_THE_FILES}:
        raise ModelError(
            "--mm-process-config: min_pixels and max_pixels are for models of the Qwen-VL line and GLM-4.1V; "
            "images of this one have the sizes of its files: leave both out"
        )


def open_transcription(folder: Path, processor: MediaProcessor | None) -> TranscriptionFacts | None:
    """How the model in this folder transcribes; None: it does not. Raises ModelError."""
    sounds = None if processor is None else processor.sounds
    if sounds is None or not sounds.is_cut:
        return None
    generation = read_whisper_generation(folder)
    heads = generation.alignment_heads
    return TranscriptionFacts(
        rate=sounds.rate,
        longest_s=sounds.max_s,
        suppressed=tuple([id for id in generation.suppress_tokens or () if id >= 0]),
        has_languages=generation.is_multilingual,
        alignment=AlignmentFacts(tuple(heads), read_filter_width(folder, heads), STRIDE * sounds.hop_length)
        if heads
        else None,
    )


def tile_marks(vocabulary: Vocabulary) -> tuple[int, int]:
    """The tokens before and behind the tiles of an image. Raises ModelError."""
    names = vocabulary.files.special_tokens
    begin = marker_id(vocabulary, names.get("start_image_token", "<img>"))
    return begin, marker_id(vocabulary, names.get("end_image_token", "</img>"))


def tile_placeholders(encoder: InternVlEncoder, vocabulary: Vocabulary) -> dict[MediaKind, int]:
    """The tokens that stand for images and, where the tokenizer has one, for videos. Raises ModelError."""
    names = vocabulary.files.special_tokens
    is_known = encoder.authors is None
    image_id = encoder.placeholder_id if is_known else marker_id(vocabulary, "<IMG_CONTEXT>")
    video_texts = [names.get("video_token", "<video>"), *([] if is_known else [AUTHORS_VIDEO])]
    known = [id for text in video_texts if (id := vocabulary.token_id(text)) is not None]
    video_id = next(iter(known), None)
    return {MediaKind.IMAGE: image_id} | ({} if video_id is None else {MediaKind.VIDEO: video_id})


def sound_marks(encoder: OmniEncoder, vocabulary: Vocabulary) -> SoundMarks | None:
    """Tokens around the sound of a video; None: neither config.json nor the tokenizer names them."""
    ids = encoder.audio_marks
    if ids is None:
        names = vocabulary.files.special_tokens
        texts = [names.get(name, default) for name, default in SOUND_MARKS]
        start_id, end_id = (vocabulary.token_id(text) for text in texts)
        ids = None if start_id is None or end_id is None else (start_id, end_id)
    if ids is None:
        return None
    return SoundMarks(start_id=ids[0], end_id=ids[1], chunk_positions=encoder.chunk_positions)

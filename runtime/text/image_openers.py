"""What prepares the images of families whose tokens of an image are made of the tokenizer's own, or that cut
images into parts."""

from pathlib import Path

from runtime.media_kind import MediaKind
from runtime.models.config.deepseek_hybrid_config import DeepSeekHybridEncoder
from runtime.models.config.deepseek_ocr_config import DeepSeekOcrEncoder
from runtime.models.config.kimi_vision_config import KimiEncoder
from runtime.models.config.llama4_vision_config import Llama4Encoder
from runtime.models.config.minicpmv_config import MiniCpmVEncoder
from runtime.models.config.siglip_config import SiglipEncoder
from runtime.text.deepseek_hybrid_images import open_hybrid_images
from runtime.text.deepseek_ocr_images import open_deepseek_ocr_images
from runtime.text.kimi_images import KimiImageProcessor, read_kimi_images
from runtime.text.llama4_images import open_llama4_images
from runtime.text.media_prompts import MediaProcessor
from runtime.text.minicpmv_images import open_minicpmv_images
from runtime.text.siglip_images import open_siglip_images
from runtime.text.smolvlm_videos import open_smolvlm
from runtime.text.vocabulary import Vocabulary

ImageEncoder = (
    DeepSeekHybridEncoder | DeepSeekOcrEncoder | KimiEncoder | Llama4Encoder | MiniCpmVEncoder | SiglipEncoder
)


def open_images(folder: Path, encoder: ImageEncoder, vocabulary: Vocabulary) -> MediaProcessor:
    """What prepares images for `encoder`, as the model's folder says. Raises ModelError."""
    match encoder:
        case DeepSeekHybridEncoder():
            return open_hybrid_images(folder, encoder)
        case DeepSeekOcrEncoder():
            return open_deepseek_ocr_images(folder, encoder)
        case KimiEncoder():
            return KimiImageProcessor(encoder, read_kimi_images(folder, encoder))
        case Llama4Encoder():
            return open_llama4_images(folder, encoder, vocabulary)
        case MiniCpmVEncoder():
            return open_minicpmv_images(folder, encoder, vocabulary)
        case SiglipEncoder() if MediaKind.VIDEO in encoder.kinds:
            return open_smolvlm(folder, encoder, vocabulary)
        case SiglipEncoder():
            return open_siglip_images(folder, encoder, vocabulary)

"""What prepares a model's images, by its encoder."""

from pathlib import Path

from runtime.errors import ModelError
from runtime.models.config.image_config import read_image_config
from runtime.models.config.media_config import MediaConfig
from runtime.text.media_prompts import MediaPrompts


def open_prompts(folder: Path, encoder: MediaConfig | None) -> MediaPrompts | None:
    """Prompts with images for `encoder`, which are prepared as the model's folder says; None: the model takes
    text alone. Raises ModelError."""
    if encoder is None:
        return None
    # Pillow is imported for models that take images only
    try:
        from runtime.text.image_processor import ClipImageProcessor
    except ModuleNotFoundError:
        raise ModelError(
            "the model takes images, which Pillow prepares, and it is not installed; run pip install "
            "pillow, or set --enable-multimodal false to serve text alone"
        ) from None

    return MediaPrompts(ClipImageProcessor(encoder, read_image_config(folder)))

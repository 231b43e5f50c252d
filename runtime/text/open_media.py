"""What prepares a model's images, by its encoder."""

from pathlib import Path

from runtime.errors import ModelError
from runtime.models.config.image_config import read_image_config
from runtime.models.config.media_config import MediaConfig
from runtime.text.media_prompts import MediaProcessor


def open_processor(folder: Path, encoder: MediaConfig | None) -> MediaProcessor | None:
    """What prepares images for `encoder`, as the model's folder says; None: the model takes text alone.
    Raises ModelError."""
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

    return ClipImageProcessor(encoder, read_image_config(folder))

"""What prepares a model's images, by its encoder."""

from pathlib import Path

from runtime.models.config.image_config import read_image_config
from runtime.models.config.media_config import MediaConfig
from runtime.text.media_prompts import MediaProcessor


def open_processor(folder: Path, encoder: MediaConfig) -> MediaProcessor:
    """What prepares images for `encoder`, as the model's folder says. Raises ModelError."""
    # Pillow is imported for models that take images only
    from runtime.text.image_processor import ClipImageProcessor

    return ClipImageProcessor(encoder, read_image_config(folder))

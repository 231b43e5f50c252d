"""Images for SigLIP 2's NaFlex: their own shape, in about as many patches as the model may have."""

from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image

from runtime.messages.media import Media, MediaKind
from runtime.models.config.dual_config import DualImages, NaflexConfig, read_dual_images, read_naflex
from runtime.text.image_processor import ClipImageProcessor, normalized
from runtime.text.media_prompts import MediaProcessor, Prepared, check_kind
from runtime.text.pictures import picture_of, pixels_of


class NaflexImageProcessor:
    """See MediaProcessor. Each image is one token."""

    sounds = None
    is_attended = False

    def __init__(self, encoder: DualImages, config: NaflexConfig) -> None:
        self.placeholder_ids = {MediaKind.IMAGE: encoder.placeholder_id}
        self._encoder, self._config = encoder, config

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [rows * columns, patch_size^2 * 3], row by row."""
        check_kind(media, self._encoder.kinds)
        config, image = self._config, media.values[0]
        rows, columns = config.grid(*image.shape[:2])
        size = config.patch_size
        shape = columns * size, rows * size
        resized = pixels_of(picture_of(image).resize(shape, Image.Resampling(config.resample)))
        pixels = normalized(resized.transpose(2, 0, 1), config)
        patches = pixels.reshape(3, rows, size, columns, size).transpose(1, 3, 2, 4, 0)
        return Prepared(
            kind=media.kind,
            digest=sha256(media.digest + msgspec.json.encode(config)).digest(),
            values=np.ascontiguousarray(patches).reshape(rows * columns, -1),
            token_ids=[self._encoder.placeholder_id],
            positions=np.zeros(1, np.int32),
            grid=(1, rows, columns),
        )


def open_dual_images(folder: Path, encoder: DualImages) -> MediaProcessor:
    """What prepares the images of CLIP, SigLIP or NaFlex, as the model's folder says. Raises ModelError."""
    if encoder.is_naflex:
        return NaflexImageProcessor(encoder, read_naflex(folder, encoder))
    return ClipImageProcessor(encoder, read_dual_images(folder, encoder))

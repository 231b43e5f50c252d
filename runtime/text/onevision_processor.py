"""Images and videos as LLaVA-OneVision's encoder takes them: tiles, or frames, of one size, with the
arithmetic of transformers' image processor on Pillow."""

from hashlib import sha256
from math import ceil
from pathlib import Path

import numpy as np
from PIL import Image

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.image_config import ImageConfig, Size, read_image_fields
from runtime.models.config.onevision_config import OneVisionEncoder
from runtime.text.image_processor import clip_pixels
from runtime.text.media_prompts import Prepared, check_kind
from runtime.text.pictures import picture_of, pixels_of


class TileConfig(ImageConfig, frozen=True, kw_only=True):
    """How images are prepared, with the defaults of LLaVA-OneVision."""

    size: Size | int = Size(height=384, width=384)
    do_center_crop: bool = False
    image_grid_pinpoints: tuple[tuple[int, int], ...] | None = None


def read_tiles(folder: Path, encoder: OneVisionEncoder) -> TileConfig:
    """How the images of the model in this folder are prepared for its encoder. Raises ModelError."""
    config, name = read_image_fields(folder, TileConfig)
    edge = encoder.tower.image_size
    if config.resized(edge, edge) != (edge, edge) or config.do_center_crop or not config.do_resize:
        raise ModelError(f"{name}: size must be {edge} x {edge}, as in config.json, without do_center_crop")
    if config.image_grid_pinpoints not in (None, encoder.pinpoints):
        raise ModelError(
            f"{name} has other image_grid_pinpoints than config.json; restore both from the model's source"
        )
    if min(config.image_std) <= 0 or not 0 <= config.resample <= 5:
        raise ModelError(
            f"{name} has an image_std of 0, or no known resample; restore it from the model's source"
        )
    return config


class OneVisionProcessor:
    """Prepares images and videos for OneVisionEncoder; see MediaProcessor."""

    sounds = None
    is_attended = False

    def __init__(self, encoder: OneVisionEncoder, config: TileConfig) -> None:
        self.placeholder_ids = {
            MediaKind.IMAGE: encoder.placeholder_id,
            MediaKind.VIDEO: encoder.video_placeholder_id,
        }
        self._encoder, self._config = encoder, config

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [N, 3, height, width]: an image and its tiles, the image
        alone where its prompt has several, or frames. The grid has N, and height and width of an image."""
        encoder, config = self._encoder, self._config
        check_kind(media, encoder.kinds)
        height, width = media.values.shape[1:3]
        if media.kind is MediaKind.VIDEO:
            parts = list(media.values)
            grid, count = (len(parts), 0, 0), len(parts) * encoder.frame_rows + 1
        elif media.num_images > 1:
            parts = [padded_to_square(media.values[0], config)]
            grid, count = (1, height, width), encoder.side**2 + 1
        else:
            image, kept = media.values[0], encoder.tiles_of(height, width)
            parts = [image, *cut_tiles(image, encoder.best_size(height, width), config, encoder)]
            count = encoder.side**2 + kept.kept_rows * (kept.kept_columns + 1)
            grid = len(parts), height, width
        return Prepared(
            kind=media.kind,
            digest=sha256(b"%b %b %d" % (media.digest, config.digest_text, len(parts))).digest(),
            values=np.stack([clip_pixels(part, config, media.param) for part in parts]),
            token_ids=[self.placeholder_ids[media.kind]] * count,
            positions=np.arange(count, dtype=np.int32),
            grid=grid,
        )


def padded_to_square(image: np.ndarray, config: ImageConfig) -> np.ndarray:
    """uint8 [height, width, 3] in the middle of a square of the mean colour."""
    height, width = image.shape[:2]
    edge = max(height, width)
    square = np.empty((edge, edge, 3), np.uint8)
    square[:] = [int(mean * 255) for mean in config.image_mean]
    top, left = (edge - height) // 2, (edge - width) // 2
    square[top : top + height, left : left + width] = image
    return square


def cut_tiles(
    image: np.ndarray, size: tuple[int, int], config: ImageConfig, encoder: OneVisionEncoder
) -> list[np.ndarray]:
    """The tiles of an image, uint8 [height, width, 3] each, which is resized to fit in `size` and padded with
    black around it."""
    height, width = image.shape[:2]
    scale_high, scale_wide = size[0] / height, size[1] / width
    if scale_wide < scale_high:
        new = min(ceil(height * scale_wide), size[0]), size[1]
    else:
        new = size[0], min(ceil(width * scale_high), size[1])
    resized = pixels_of(picture_of(image).resize(new[::-1], Image.Resampling(config.resample)))
    whole, edge = np.zeros((*size, 3), np.uint8), encoder.tower.image_size
    top, left = (size[0] - new[0]) // 2, (size[1] - new[1]) // 2
    whole[top : top + new[0], left : left + new[1]] = resized
    return [
        whole[row : row + edge, column : column + edge]
        for row in range(0, size[0], edge)
        for column in range(0, size[1], edge)
    ]

"""Images as Gemma 3's encoder takes them, and the tokens that stand for one: newlines and marks around its
rows."""

from collections.abc import Callable
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from runtime.errors import InvalidRequest, ModelError
from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.gemma_vision_config import Gemma3Encoder
from runtime.models.config.image_config import ImageConfig, read_image_fields
from runtime.text.image_processor import clip_pixels
from runtime.text.media_prompts import Prepared, check_kind

MAX_NEWLINES = 16  # that a token joins with those of an image
AROUND = 2  # newlines on either side of an image


class GemmaImageConfig(ImageConfig, frozen=True, kw_only=True):
    """How images are prepared, with the defaults of Gemma 3: resized to one size, scaled, normalized."""

    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    resample: int = 2  # Pillow's number of the filter; 2: bilinear
    do_center_crop: bool = False
    do_pan_and_scan: bool = False  # crops of the image follow it


def read_gemma_images(folder: Path) -> GemmaImageConfig:
    """How the images of the model in this folder are prepared. Raises ModelError."""
    config, name = read_image_fields(folder, GemmaImageConfig)
    if config.do_pan_and_scan:
        raise ModelError(f"{name}: do_pan_and_scan is not supported; set it to false")
    if min(config.image_std) <= 0 or not 0 <= config.resample <= 5:
        raise ModelError(
            f"{name} has an image_std of 0, or no known resample; restore it from the model's source"
        )
    return config


class GemmaImageProcessor:
    """Prepares images for Gemma3Encoder; see MediaProcessor."""

    sounds = None
    is_attended = False

    def __init__(
        self, encoder: Gemma3Encoder, config: GemmaImageConfig, encode: Callable[[str], list[int]]
    ) -> None:
        """`encode`: makes tokens of newlines."""
        self.placeholder_ids = {MediaKind.IMAGE: encoder.placeholder_id}
        self._encoder, self._config, self._encode = encoder, config, encode

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [3, height, width]."""
        encoder = self._encoder
        check_kind(media, encoder.kinds)
        values = clip_pixels(media.values[0], self._config, media.param)
        size = encoder.tower.image_size
        if values.shape != (3, size, size):
            raise InvalidRequest(
                f"{media.param}: the image is {values.shape[2]} x {values.shape[1]} pixels when "
                f"prepared, and the model takes {size} x {size}; send an image of another shape",
                param=media.param,
            )
        newlines, count = self._newlines, encoder.num_rows
        before = [*newlines, encoder.placeholder_id]
        return Prepared(
            kind=media.kind,
            digest=sha256(media.digest + self._config.digest_text).digest(),
            values=values,
            token_ids=[*before, *[encoder.row_id] * count, encoder.end_id, *newlines],
            positions=np.arange(len(before), len(before) + count, dtype=np.int32),
            joined=self._joined,
        )

    @cached_property
    def _newlines(self) -> list[int]:
        """Tokens of the newlines on one side of an image."""
        return self._encode("\n" * AROUND)

    @cached_property
    def _joined(self) -> dict[tuple[int, int], int]:
        """Neighbours of newlines that are one token in a text, and that token."""
        encoded = {count: self._encode("\n" * count) for count in range(1, MAX_NEWLINES + AROUND)}
        single = {count: ids[0] for count, ids in encoded.items() if len(ids) == 1}
        return {
            (first, second): single[one + other]
            for one, first in single.items()
            for other, second in single.items()
            if one + other in single
        }

"""Images as CLIP's encoders take them: resized, cut out of the middle, scaled and normalized, with the
arithmetic of transformers' image processors on Pillow."""

from hashlib import sha256

import numpy as np
from PIL import Image

from runtime.errors import InvalidRequest
from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.dual_config import DualImages
from runtime.models.config.image_config import ImageConfig, Normalization
from runtime.models.config.media_config import LlavaEncoder
from runtime.text.media_prompts import Prepared, check_kind
from runtime.text.pictures import picture_of, pixels_of

MAX_PIXELS = 1 << 26  # of an image after it was resized: narrow images become very long


class ClipImageProcessor:
    """Prepares images for LlavaEncoder and DualImages; see MediaProcessor. Each is as many tokens as the
    encoder makes rows."""

    sounds = None
    is_attended = False

    def __init__(self, encoder: LlavaEncoder | DualImages, config: ImageConfig) -> None:
        self.placeholder_ids = {MediaKind.IMAGE: encoder.placeholder_id}
        self._encoder = encoder
        self._config = config

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [3, height, width]."""
        check_kind(media, self._encoder.kinds)
        values = clip_pixels(media.values[0], self._config, media.param)
        size = self._encoder.tower.image_size
        if values.shape != (3, size, size):
            raise InvalidRequest(
                f"{media.param}: the image is {values.shape[2]} x {values.shape[1]} pixels when "
                f"prepared, and the model takes {size} x {size}; send an image of another shape",
                param=media.param,
            )
        count = self._encoder.num_rows
        return Prepared(
            kind=media.kind,
            digest=sha256(media.digest + self._config.digest_text).digest(),
            values=values,
            token_ids=[self._encoder.placeholder_id] * count,
            positions=np.arange(count, dtype=np.int32),
        )


def clip_pixels(image: np.ndarray, config: ImageConfig, param: str) -> np.ndarray:
    """uint8 [height, width, 3] -> float32 [3, height, width]. Raises InvalidRequest for an image that would
    be too large when resized."""
    if config.do_resize:
        height, width = config.resized(*image.shape[:2])
        if height * width > MAX_PIXELS:
            raise InvalidRequest(
                f"{param}: an image of {image.shape[1]} x {image.shape[0]} pixels is too narrow; crop it",
                param=param,
            )
        image = pixels_of(picture_of(image).resize((width, height), Image.Resampling(config.resample)))
    pixels = image.transpose(2, 0, 1)
    if config.do_center_crop:
        pixels = center_crop(pixels, *config.crop)
    return normalized(pixels, config)


def normalized(pixels: np.ndarray, config: Normalization) -> np.ndarray:
    """[3, height, width], of 0 to 255, -> float32, scaled and normalized."""
    if config.do_rescale:
        pixels = (pixels.astype(np.float64) * config.rescale_factor).astype(np.float32)
    if config.do_normalize:
        mean, std = (np.array(x, np.float32)[:, None, None] for x in (config.image_mean, config.image_std))
        pixels = (pixels.astype(np.float32) - mean) / std
    return np.ascontiguousarray(pixels, np.float32)


def center_crop(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle of [C, H, W] as [C, height, width]; where it is smaller, zeros are around it."""
    for axis, size in ((1, height), (2, width)):
        have = pixels.shape[axis]
        if have < size:
            before = -(-(size - have) // 2)
            padding = [(0, 0)] * 3
            padding[axis] = before, size - have - before
            pixels = np.pad(pixels, padding)
    top, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
    return pixels[:, top : top + height, left : left + width]

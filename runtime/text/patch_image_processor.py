"""Images of any size as patches for the encoders of Qwen2-VL and Qwen2.5-VL, with the arithmetic of
transformers' image processor on Pillow."""

from hashlib import sha256

import numpy as np
from PIL import Image

from runtime.errors import InvalidRequest
from runtime.messages.media import Media, MediaKind
from runtime.models.config.patch_image_config import MAX_STRETCH, PatchImageConfig
from runtime.models.config.qwen_vl_config import QwenVlEncoder
from runtime.text.image_processor import normalized
from runtime.text.media_prompts import Prepared, check_kind


class PatchImageProcessor:
    """Prepares images for QwenVlEncoder; see MediaProcessor. Its tokens stand in a grid."""

    sounds = None

    def __init__(self, encoder: QwenVlEncoder, config: PatchImageConfig) -> None:
        self.placeholder_id = encoder.placeholder_id
        self._config, self._kinds = config, encoder.kinds

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [patches, 3, patch_size, patch_size], with the patches of
        one row of the encoding side by side."""
        check_kind(media, self._kinds)
        config, image = self._config, media.values[0]
        height, width = image.shape[:2]
        unit = config.patch_size * config.merge_size
        if not config.do_resize and (height % unit or width % unit):
            raise InvalidRequest(
                f"{media.param}: the model takes images as they are, and their width and height must be "
                f"multiples of {unit} pixels, not {width} x {height}; resize it",
                param=media.param,
            )
        if max(height, width) > MAX_STRETCH * min(height, width):
            raise InvalidRequest(
                f"{media.param}: an image of {width} x {height} pixels is too narrow; crop it",
                param=media.param,
            )
        patches, rows, columns = image_patches(image, config)
        token_grid = 1, rows // config.merge_size, columns // config.merge_size
        count = token_grid[1] * token_grid[2]
        return Prepared(
            kind=MediaKind.IMAGE,
            digest=sha256(media.digest + config.digest_text).digest(),
            values=patches,
            token_ids=[self.placeholder_id] * count,
            positions=np.arange(count, dtype=np.int32),
            grid=(1, rows, columns),
            token_grid=token_grid,
        )


def image_patches(image: np.ndarray, config: PatchImageConfig) -> tuple[np.ndarray, int, int]:
    """uint8 [height, width, 3] -> float32 [patches, 3, patch_size, patch_size], and how many rows and columns
    of patches there are."""
    height, width = image.shape[:2]
    if config.do_resize:
        height, width = config.resized(height, width)
        image = np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling(config.resample)))
    pixels = normalized(image.transpose(2, 0, 1), config)
    patch, merge = config.patch_size, config.merge_size
    rows, columns = height // patch, width // patch
    squares = pixels.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
    patches = squares.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, patch, patch)
    return np.ascontiguousarray(patches), rows, columns

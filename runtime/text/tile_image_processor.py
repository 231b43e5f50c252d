"""Images as square tiles for InternVL's encoder, with the arithmetic of transformers' image processor on
Pillow."""

from hashlib import sha256

import numpy as np
from PIL import Image

from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.internvl_config import InternVlEncoder
from runtime.models.config.tile_image_config import TileImageConfig
from runtime.text.image_processor import normalized
from runtime.text.media_prompts import Prepared, check_kind


class TileImageProcessor:
    """Prepares images for InternVlEncoder; see MediaProcessor. The tokens of an image stand between two
    marks, which take no row of the encoding."""

    sounds = None
    is_attended = False

    def __init__(self, encoder: InternVlEncoder, config: TileImageConfig, marks: tuple[int, int]) -> None:
        self.placeholder_ids = {MediaKind.IMAGE: encoder.placeholder_id}
        self._encoder, self._config, self._marks = encoder, config, marks

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [tiles, 3, size, size]."""
        check_kind(media, self._encoder.kinds)
        tiles = image_tiles(media.values[0], self._config)
        count = len(tiles) * self._encoder.num_rows
        return Prepared(
            kind=media.kind,
            digest=sha256(media.digest + self._config.digest_text).digest(),
            values=tiles,
            token_ids=[self._marks[0], *[self._encoder.placeholder_id] * count, self._marks[1]],
            positions=np.arange(1, count + 1, dtype=np.int32),
        )


def image_tiles(image: np.ndarray, config: TileImageConfig) -> np.ndarray:
    """uint8 [height, width, 3] -> float32 [tiles, 3, size, size]: row by row, and where they are several the
    whole image last."""
    columns, rows = config.grid(*image.shape[:2])
    height, width = config.size.height, config.size.width
    picture, resample = Image.fromarray(image), Image.Resampling(config.resample)
    whole = np.asarray(picture.resize((columns * width, rows * height), resample))
    tiles = list(whole.reshape(rows, height, columns, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3))
    if len(tiles) > 1:
        tiles.append(np.asarray(picture.resize((width, height), resample)))
    return np.stack([normalized(tile.transpose(2, 0, 1), config) for tile in tiles])

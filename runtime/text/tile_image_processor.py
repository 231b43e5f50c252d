"""Images as square tiles for InternVL's encoder, with the arithmetic of transformers' image processor on
Pillow."""

from collections.abc import Callable, Mapping
from hashlib import sha256

import numpy as np
from PIL import Image

from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.internvl_config import InternVlEncoder
from runtime.models.config.tile_image_config import TileImageConfig
from runtime.text.image_processor import normalized
from runtime.text.media_prompts import Prepared, check_kind
from runtime.text.pictures import picture_of, pixels_of


class TileImageProcessor:
    """Prepares images and videos for InternVlEncoder; see MediaProcessor. The tokens of an image, or of a
    frame, stand between two marks, which take no row of the encoding. Frames have their numbers as text
    before them."""

    sounds = None
    is_attended = False

    def __init__(
        self,
        encoder: InternVlEncoder,
        config: TileImageConfig,
        marks: tuple[int, int],
        placeholder_ids: Mapping[MediaKind, int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """`placeholder_ids`: without that of videos, which are refused then; `encode`: makes tokens of the
        numbers of frames."""
        self.placeholder_ids = placeholder_ids
        self._kinds = frozenset(placeholder_ids)
        self._num_rows, self._config, self._marks, self._encode = encoder.num_rows, config, marks, encode

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [tiles, 3, size, size]; each frame is one tile."""
        check_kind(media, self._kinds)
        if media.kind is MediaKind.VIDEO:
            tiles = np.stack([tile_of(picture_of(frame), self._config) for frame in media.values])
            ids, positions = self._frames(len(tiles))
        else:
            tiles = image_tiles(media.values[0], self._config)
            ids, positions = self._marked(len(tiles) * self._num_rows), np.arange(len(tiles) * self._num_rows)
            positions += 1
        return Prepared(
            kind=media.kind,
            digest=sha256(media.digest + self._config.digest_text).digest(),
            values=tiles,
            token_ids=ids,
            positions=positions.astype(np.int32),
        )

    def _marked(self, count: int) -> list[int]:
        return [self._marks[0], *[self.placeholder_ids[MediaKind.IMAGE]] * count, self._marks[1]]

    def _frames(self, count: int) -> tuple[list[int], np.ndarray]:
        """The tokens of a video, and which of them take a row."""
        ids: list[int] = []
        firsts = []
        for number in range(1, count + 1):
            ids += self._encode(f"Frame{number}: " if number == 1 else f"\nFrame{number}: ")
            firsts.append(len(ids) + 1)
            ids += self._marked(self._num_rows)
        return ids, (np.array(firsts)[:, None] + np.arange(self._num_rows)).ravel()


def image_tiles(image: np.ndarray, config: TileImageConfig) -> np.ndarray:
    """uint8 [height, width, 3] -> float32 [tiles, 3, size, size]: row by row, and where they are several the
    whole image last."""
    columns, rows = config.grid(*image.shape[:2])
    height, width = config.size.height, config.size.width
    picture, resample = picture_of(image), Image.Resampling(config.resample)
    whole = pixels_of(picture.resize((columns * width, rows * height), resample))
    tiles = list(whole.reshape(rows, height, columns, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3))
    cut = [normalized(tile.transpose(2, 0, 1), config) for tile in tiles]
    if len(tiles) > 1 and config.has_whole:
        cut.append(tile_of(picture, config))
    return np.stack(cut)


def tile_of(picture: Image.Image, config: TileImageConfig) -> np.ndarray:
    """A whole picture as one tile, float32 [3, size, size]."""
    size = config.size.width, config.size.height
    resized = pixels_of(picture.resize(size, Image.Resampling(config.resample)))
    return normalized(resized.transpose(2, 0, 1), config)

"""Images as square tiles of one size, with tokens of their own before, between and behind those of the
tiles' rows."""

from collections.abc import Callable
from hashlib import sha256

import numpy as np
from msgspec import Struct

from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.text.media_prompts import Prepared, check_kind

IMAGES = frozenset({MediaKind.IMAGE})


class Tiles(Struct, frozen=True, kw_only=True):
    """An image in tiles."""

    values: np.ndarray  # float32 [tiles, 3, size, size]: row by row, and the whole image
    rows: int  # of tiles besides the whole image; 0: there are none
    columns: int

    @property
    def count(self) -> int:
        """Tiles, with the whole image."""
        return len(self.values)


# uint8 [height, width, 3], and the field that named the image -> its tiles. Raises InvalidRequest for a shape
# that the model does not take
Cut = Callable[[np.ndarray, str], Tiles]
# an image's tiles -> the tokens before the rows of each tile, and those behind the last
Marks = Callable[[Tiles], list[list[int]]]


class TileTokens(Struct, frozen=True, kw_only=True):
    """The tokens of a prompt that stand for images."""

    placeholder_id: int  # an image, before the prompt is expanded
    row_id: int  # a row of the encoding
    rows_per_tile: int
    marks: Marks


class MarkedTileProcessor:
    """Prepares images that are cut into tiles; see MediaProcessor."""

    sounds = None
    is_attended = False

    def __init__(self, tokens: TileTokens, cut: Cut, digest_text: bytes) -> None:
        """`digest_text`: what tells prepared images of one file apart."""
        self.placeholder_ids = {MediaKind.IMAGE: tokens.placeholder_id}
        self._tokens, self._cut, self._digest_text = tokens, cut, digest_text

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [tiles, 3, size, size]."""
        check_kind(media, IMAGES)
        tokens, tiles = self._tokens, self._cut(media.values[0], media.param)
        rows = [tokens.row_id] * tokens.rows_per_tile
        ids: list[int] = []
        starts: list[int] = []
        *before, behind = tokens.marks(tiles)
        for mark in before:
            ids += mark
            starts.append(len(ids))
            ids += rows
        each = np.arange(tokens.rows_per_tile, dtype=np.int32)
        return Prepared(
            kind=media.kind,
            digest=sha256(media.digest + self._digest_text).digest(),
            values=tiles.values,
            token_ids=ids + behind,
            positions=(np.array(starts, np.int32)[:, None] + each).ravel(),
        )


def cut_grid(image: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    """[rows * height, columns * width, 3] -> the tiles [height, width, 3], row by row."""
    height, width = image.shape[0] // rows, image.shape[1] // columns
    whole = image.reshape(rows, height, columns, width, 3).swapaxes(1, 2)
    return list(whole.reshape(-1, height, width, 3))

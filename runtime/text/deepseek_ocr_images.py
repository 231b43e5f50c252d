"""Images as DeepSeek-OCR 2's encoder takes them: tiles of larger ones, and the whole image in a square, with
the arithmetic of transformers' image processor on Pillow."""

from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from PIL import Image

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.deepseek_ocr_config import QUERIES, DeepSeekOcrEncoder
from runtime.models.config.image_config import Normalization, Size, read_image_fields
from runtime.models.config.tile_image_config import Tiles as TileCount
from runtime.models.config.tile_image_config import nearest_grid
from runtime.text.image_processor import normalized
from runtime.text.marked_tiles import cut_grid
from runtime.text.media_prompts import Prepared, check_kind
from runtime.text.pictures import picture_of, pixels_of

HALVES = (0.5, 0.5, 0.5)
Channel = Annotated[int, Meta(ge=0, le=255)]


class OcrImageConfig(Normalization, frozen=True, kw_only=True):
    """How images are prepared, with the defaults of DeepSeek-OCR 2: in the middle of a square, with tiles
    before it where they are larger than one, scaled, normalized."""

    image_mean: tuple[float, float, float] = HALVES
    image_std: tuple[float, float, float] = HALVES
    size: Size = Size(height=1024, width=1024)  # of the whole image
    tile_size: Annotated[int, Meta(ge=1, le=1 << 14)] = 768
    resample: int = 3  # Pillow's number of the filter; 3: bicubic
    crop_to_patches: bool = True
    min_patches: TileCount = 2  # fewest and most tiles
    max_patches: TileCount = 6
    background_color: tuple[Channel, Channel, Channel] = (127, 127, 127)

    @property
    def whole_size(self) -> int:
        """Height and width of the whole image in pixels."""
        return self.size.height if self.crop_to_patches else self.tile_size


class OcrImageProcessor:
    """Prepares images for DeepSeekOcrEncoder; see MediaProcessor."""

    sounds = None
    is_attended = False

    def __init__(self, encoder: DeepSeekOcrEncoder, config: OcrImageConfig) -> None:
        self.placeholder_ids = {MediaKind.IMAGE: encoder.placeholder_id}
        self._encoder, self._config = encoder, config
        self._digest_text = msgspec.json.encode(config)

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [3, height, width] of each tile, and of the whole image,
        which comes last: parts of the file. A grid of 2 frames names the latter."""
        check_kind(media, self._encoder.kinds)
        image, config = media.values[0], self._config
        tiles: list[np.ndarray] = []
        if config.crop_to_patches and max(image.shape[:2]) > config.tile_size:
            tiles = self._tiles(image)
        parts = [self._part(media, tile, index) for index, tile in enumerate(tiles)]
        first, *others = [*parts, self._part(media, self._whole(image), len(tiles), is_whole=True)]
        return msgspec.structs.replace(first, parts=tuple(others))

    def _tiles(self, image: np.ndarray) -> list[np.ndarray]:
        """The tiles of an image, row by row."""
        config, edge = self._config, self._config.tile_size
        columns, rows = nearest_grid(
            image.shape[0], image.shape[1], (config.min_patches, config.max_patches), edge * edge
        )
        picture = picture_of(image).resize((columns * edge, rows * edge), Image.Resampling(config.resample))
        return cut_grid(pixels_of(picture), rows, columns)

    def _whole(self, image: np.ndarray) -> np.ndarray:
        """The image in the middle of a square."""
        config, edge = self._config, self._config.whole_size
        scale = edge / max(image.shape[:2])
        height, width = (max(round(side * scale), 1) for side in image.shape[:2])
        square = np.empty((edge, edge, 3), np.uint8)
        square[:] = config.background_color
        top, left = (edge - height) // 2, (edge - width) // 2
        picture = picture_of(image).resize((width, height), Image.Resampling(config.resample))
        square[top : top + height, left : left + width] = pixels_of(picture)
        return square

    def _part(self, media: Media, picture: np.ndarray, index: int, *, is_whole: bool = False) -> Prepared:
        """Tile number `index`, or the whole image behind so many, uint8 [height, width, 3]."""
        count = self._encoder.num_rows(len(picture)) + is_whole
        return Prepared(
            kind=media.kind,
            digest=sha256(b"%b %b %d" % (media.digest, self._digest_text, index)).digest(),
            values=normalized(picture.transpose(2, 0, 1), self._config),
            token_ids=[self._encoder.placeholder_id] * count,
            positions=np.arange(count, dtype=np.int32),
            grid=(2 if is_whole else 1, 1, 1),
        )


def open_deepseek_ocr_images(folder: Path, encoder: DeepSeekOcrEncoder) -> OcrImageProcessor:
    """What prepares images, as the model's folder says. Raises ModelError."""
    config, name = read_image_fields(folder, OcrImageConfig)
    for edge in {config.tile_size, config.whole_size}:
        if encoder.num_rows(edge) not in QUERIES.values():
            raise ModelError(
                f"{name} makes images of {edge} pixels, which become {encoder.num_rows(edge)} rows, and the "
                f"encoder has queries for {' and '.join(map(str, QUERIES.values()))}; restore it from the "
                "model's source"
            )
    if min(config.image_std) <= 0 or not 0 <= config.resample <= 5:
        raise ModelError(
            f"{name} has an image_std of 0 or no known resample; restore it from the model's source"
        )
    if config.min_patches > config.max_patches:
        raise ModelError(
            f"{name} has min_patches {config.min_patches} above max_patches {config.max_patches}; restore it "
            "from the model's source"
        )
    return OcrImageProcessor(encoder, config)

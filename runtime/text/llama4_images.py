"""Images as Llama 4's encoder takes them: fitted into a canvas of square tiles, with the arithmetic of
transformers' image processor on Pillow."""

from math import floor
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct
from PIL import Image

from runtime.errors import ModelError
from runtime.models.config.image_config import Normalization, read_image_fields
from runtime.models.config.llama4_vision_config import Llama4Encoder
from runtime.text.image_processor import normalized
from runtime.text.marked_tiles import MarkedTileProcessor, Tiles, TileTokens, cut_grid
from runtime.text.marker_tokens import marker_id
from runtime.text.pictures import picture_of, pixels_of
from runtime.text.vocabulary import Vocabulary

START, END, IMAGE = "<|image_start|>", "<|image_end|>", "<|image|>"
NEXT_TILE, NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"
Grid = tuple[int, int]  # rows and columns of tiles


class TileSize(Struct, frozen=True):
    """Height and width of a tile in pixels."""

    height: int = 336
    width: int = 336


class Llama4ImageConfig(Normalization, frozen=True, kw_only=True):
    """How images are prepared, with the defaults of Llama 4."""

    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    size: TileSize = TileSize()
    resample: int = 2  # Pillow's number of the filter; 2: bilinear
    max_patches: Annotated[int, Meta(ge=1, le=256)] = 16  # most tiles of an image
    resize_to_max_canvas: bool = False

    def canvas(self, height: int, width: int) -> Grid:
        """The grid of tiles for an image: the one that it fills when it is stretched least, or shrunk least
        where it fits in none; of several that with the fewest tiles. Scales are float32, which decides
        between canvases."""
        grids = canvases(self.max_patches)
        sides = np.array(grids, np.float32) * np.float32(self.size.height)
        scales = np.minimum(sides[:, 0] / np.float32(height), sides[:, 1] / np.float32(width))
        fitting = scales[scales >= 1]
        if len(fitting):
            chosen = fitting.max() if self.resize_to_max_canvas else fitting.min()
        else:
            chosen = scales.max()
        equal = [grid for grid, scale in zip(grids, scales, strict=True) if scale == chosen]
        return min(equal, key=lambda grid: grid[0] * grid[1])

    def fitted(self, height: int, width: int, grid: Grid) -> tuple[int, int]:
        """Height and width of an image when it was resized to fit into this grid, with its shape kept; it is
        enlarged up to the size of a tile only."""
        edge = self.size.height
        scales: list[float | np.float32] = []
        limits: list[int] = []
        for length, count in zip((height, width), grid, strict=True):
            target, most = count * edge, max(length, edge)
            is_canvas = self.resize_to_max_canvas or target < most
            limits.append(target if is_canvas else most)
            # transformers divides canvases as tensors of float32, and other sizes as numbers of Python
            scales.append(np.float32(target) / np.float32(length) if is_canvas else most / length)
        high, wide = scales
        if wide < high:
            return max(min(floor(height * wide), limits[0]), 1), max(limits[1], 1)
        return max(limits[0], 1), max(min(floor(width * high), limits[1]), 1)

    @property
    def digest_text(self) -> bytes:
        """What tells prepared images of one file apart."""
        return msgspec.json.encode(self)


def canvases(most: int) -> list[Grid]:
    """Grids of up to `most` tiles: those of one shape together, larger ones first."""
    by_shape: dict[float, list[Grid]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                by_shape.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return [grid for grids in by_shape.values() for grid in grids]


def cut_tiles(image: np.ndarray, config: Llama4ImageConfig) -> Tiles:
    """uint8 [height, width, 3] in tiles, with black at the right and at the bottom; and if they are several
    the whole image in the size of a tile behind them."""
    edge, resample = config.size.height, Image.Resampling(config.resample)
    rows, columns = config.canvas(*image.shape[:2])
    height, width = config.fitted(image.shape[0], image.shape[1], (rows, columns))
    picture = picture_of(image)
    canvas = np.zeros((rows * edge, columns * edge, 3), np.uint8)
    canvas[:height, :width] = pixels_of(picture.resize((width, height), resample))
    tiles = cut_grid(canvas, rows, columns)
    is_split = len(tiles) > 1
    if is_split:
        tiles.append(pixels_of(picture.resize((edge, edge), resample)))
    values = np.stack([tile_pixels(tile, config) for tile in tiles])
    return Tiles(values=values, rows=rows if is_split else 0, columns=columns if is_split else 0)


def tile_pixels(tile: np.ndarray, config: Llama4ImageConfig) -> np.ndarray:
    """uint8 [height, width, 3] -> float32 [3, height, width], scaled and normalized in bfloat16 as the model
    was trained with."""
    pixels = tile.transpose(2, 0, 1)
    if not (config.do_rescale and config.do_normalize):
        return normalized(pixels, config)
    mean, std = (rounded(np.array(x, np.float32)) for x in (config.image_mean, config.image_std))
    values = rounded(np.arange(256, dtype=np.float32) * np.float32(config.rescale_factor))
    table = rounded(rounded(values - mean[:, None]) / std[:, None])  # of each channel, [3, 256]
    return np.stack([row[channel] for row, channel in zip(table, pixels, strict=True)])


def rounded(x: np.ndarray) -> np.ndarray:
    """float32, rounded to what bfloat16 has: to nearest, and halves to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def open_llama4_images(folder: Path, encoder: Llama4Encoder, vocabulary: Vocabulary) -> MarkedTileProcessor:
    """What prepares images, as the model's folder says. Raises ModelError."""
    config, name = read_image_fields(folder, Llama4ImageConfig)
    if (config.size.height, config.size.width) != (encoder.image_size,) * 2:
        raise ModelError(
            f"{name} has tiles of {config.size.width} x {config.size.height} pixels, and config.json an "
            f"image_size of {encoder.image_size}; restore both from the model's source"
        )
    if min(config.image_std) <= 0 or not 0 <= config.resample <= 5:
        raise ModelError(
            f"{name} has an image_std of 0 or no known resample; restore it from the model's source"
        )
    start, end, image, next_tile, next_row = (
        marker_id(vocabulary, text) for text in (START, END, IMAGE, NEXT_TILE, NEXT_ROW)
    )

    def marks(tiles: Tiles) -> list[list[int]]:
        """Tiles of a row have one mark between them, and the last of a row another behind it."""
        if not tiles.rows:
            return [[start, image], [end]]
        found = [[next_tile] for _ in range(tiles.count)]
        for row in range(tiles.rows):
            found[row * tiles.columns] = [next_row]
        return [[start], *found[1 : tiles.rows * tiles.columns], [next_row, image], [end]]

    tokens = TileTokens(
        placeholder_id=image, row_id=encoder.row_id, rows_per_tile=encoder.num_rows, marks=marks
    )
    return MarkedTileProcessor(tokens, lambda pixels, _: cut_tiles(pixels, config), config.digest_text)

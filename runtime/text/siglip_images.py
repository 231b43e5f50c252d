"""Images as square tiles for SigLIP's tower in DeepSeek-VL, Aya Vision, Command A Vision, Idefics 3 and
SmolVLM, with the arithmetic of transformers' image processors on Pillow."""

from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct
from PIL import Image

from runtime.errors import ModelError
from runtime.models.config.image_config import Normalization, Size, read_image_fields
from runtime.models.config.row_image_config import LongestSize
from runtime.models.config.siglip_config import Layout, SiglipEncoder
from runtime.models.config.tile_image_config import TileImageConfig, read_tile_images
from runtime.text.image_processor import normalized
from runtime.text.marked_tiles import Cut, MarkedTileProcessor, Marks, Tiles, TileTokens, cut_grid
from runtime.text.marker_tokens import marker_id
from runtime.text.pictures import picture_of, pixels_of
from runtime.text.tile_image_processor import image_tiles
from runtime.text.vocabulary import Vocabulary

HALVES = (0.5, 0.5, 0.5)
LONGEST_EDGE = 4096  # pixels of an image of Idefics 3 that was resized


class SquareConfig(Normalization, frozen=True, kw_only=True):
    """How images of DeepSeek-VL are prepared: resized by their longer side, in the middle of a square of the
    mean colour, scaled, normalized."""

    size: Size = Size(height=384, width=384)
    resample: int = 3  # Pillow's number of the filter; 3: bicubic
    min_size: Annotated[int, Meta(ge=1)] = 14  # pixels of the shorter side

    @property
    def edge(self) -> int:
        """Height and width of a prepared image in pixels."""
        return self.size.height

    def cut(self, image: np.ndarray, param: str) -> Tiles:
        """See Cut."""
        square = squared(image, self.edge, self.min_size, self.resample, self.image_mean)
        return Tiles(values=normalized(square.transpose(2, 0, 1), self)[None], rows=0, columns=0)


def squared(
    image: np.ndarray, edge: int, least: int, resample: int, mean: tuple[float, float, float]
) -> np.ndarray:
    """uint8 [height, width, 3], resized by its longer side to `edge` pixels and at least to `least`, in the
    middle of a square of the mean colour, [edge, edge, 3]."""
    longer = max(image.shape[:2])
    height, width = (max(round(side * (edge / longer)), least) for side in image.shape[:2])
    square = np.empty((edge, edge, 3), np.uint8)
    square[:] = [int(one * 255) for one in mean]
    top, left = (edge - height) // 2, (edge - width) // 2
    square[top : top + height, left : left + width] = scaled_to(image, (height, width), resample)
    return square


class CanvasConfig(Normalization, frozen=True, kw_only=True):
    """How images of Command A Vision are prepared: stretched to the grid of tiles that needs least of it,
    with the whole image behind several tiles, scaled, normalized."""

    size: Size = Size(height=512, width=512)
    resample: int = 3
    crop_to_patches: bool = True
    max_patches: Annotated[int, Meta(ge=1, le=256)] = 12  # most tiles of an image

    @property
    def edge(self) -> int:
        """Height and width of a tile in pixels."""
        return self.size.height

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Columns and rows of tiles: the grid that an image is enlarged least to fill, by its shorter side;
        where it is larger than all, the one that it is shrunk least to."""
        most = self.max_patches
        grids = sorted(
            ((x, y) for x in range(1, most + 1) for y in range(1, most + 1) if x * y <= most),
            key=lambda grid: grid[0] * grid[1],
        )
        scales = [min(x * self.edge / width, y * self.edge / height) for x, y in grids]
        fitting = [scale for scale in scales if scale >= 1]
        return grids[scales.index(min(fitting) if fitting else max(scales))]

    def cut(self, image: np.ndarray, param: str) -> Tiles:
        """See Cut."""
        columns, rows = self.grid(*image.shape[:2]) if self.crop_to_patches else (1, 1)
        return split(image, (rows, columns), self.edge, self.resample, self)


class SplitConfig(Normalization, frozen=True, kw_only=True):
    """How images of Idefics 3 are prepared: resized by their longer side, then to a whole number of tiles,
    with the whole image behind several, scaled, normalized."""

    image_mean: tuple[float, float, float] = HALVES
    image_std: tuple[float, float, float] = HALVES
    do_resize: bool = True
    size: LongestSize = LongestSize(4 * 364)
    max_image_size: LongestSize = LongestSize(364)
    resample: int = 1  # Lanczos
    do_image_splitting: bool = True

    @property
    def edge(self) -> int:
        """Height and width of a tile in pixels."""
        return self.max_image_size.longest_edge

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image after it was resized the first time: the shorter side is even."""
        size = self.size
        if not self.do_resize:
            return height, width
        if not size.longest_edge:
            return size.height, size.width
        shape, longest = width / height, size.longest_edge
        if width >= height:
            height, width = int(longest / shape), longest
            height += height % 2
        else:
            height, width = longest, int(longest * shape)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        shape = width / height
        if width >= height and width > LONGEST_EDGE:
            height, width = max(int(LONGEST_EDGE / shape), 1), LONGEST_EDGE
        elif height > width and height > LONGEST_EDGE:
            height, width = LONGEST_EDGE, max(int(LONGEST_EDGE * shape), 1)
        return height, width

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles for an image of this size."""
        edge, shape = self.edge, width / height
        if width >= height:
            columns = ceil(width / edge)
            return ceil(int(columns * edge / shape) / edge), columns
        rows = ceil(height / edge)
        return rows, ceil(int(rows * edge * shape) / edge)

    def cut(self, image: np.ndarray, param: str) -> Tiles:
        """See Cut."""
        height, width = self.resized(*image.shape[:2])
        image = scaled_to(image, (height, width), self.resample)
        grid = self.grid(height, width) if self.do_image_splitting else (1, 1)
        image = scaled_to(image, (max(grid[0], 1) * self.edge, max(grid[1], 1) * self.edge), self.resample)
        return split(image, (max(grid[0], 1), max(grid[1], 1)), self.edge, self.resample, self)


def scaled_to(image: np.ndarray, size: tuple[int, int], resample: int) -> np.ndarray:
    """uint8 [height, width, 3], resized to a height and a width."""
    if image.shape[:2] == size:
        return image
    return pixels_of(picture_of(image).resize(size[::-1], Image.Resampling(resample)))


def split(image: np.ndarray, grid: tuple[int, int], edge: int, resample: int, config: Normalization) -> Tiles:
    """uint8 [height, width, 3], stretched to rows and columns of tiles of `edge` pixels, with the whole image
    in the size of a tile behind several."""
    rows, columns = grid
    tiles = cut_grid(scaled_to(image, (rows * edge, columns * edge), resample), rows, columns)
    is_split = len(tiles) > 1
    if is_split:
        tiles.append(scaled_to(image, (edge, edge), resample))
    values = np.stack([normalized(tile.transpose(2, 0, 1), config) for tile in tiles])
    return Tiles(values=values, rows=rows if is_split else 0, columns=columns if is_split else 0)


class Preparation(Struct, frozen=True):
    """How the images of a layout are cut, and the tokens that stand for one."""

    cut: Cut
    digest_text: bytes
    placeholder_id: int
    marks: Marks


def open_deepseek_vl(folder: Path, encoder: SiglipEncoder, vocabulary: Vocabulary) -> Preparation:
    """See Preparation. An image's rows have no marks. Raises ModelError."""
    config, name = read_image_fields(folder, SquareConfig)
    check(name, config, config.edge, config.resample, encoder)
    return Preparation(config.cut, msgspec.json.encode(config), encoder.placeholder_id, lambda _: [[], []])


def open_aya_vision(folder: Path, encoder: SiglipEncoder, vocabulary: Vocabulary) -> Preparation:
    """See Preparation. A tile's number stands before it, as text. Raises ModelError."""
    config: TileImageConfig = read_tile_images(folder, encoder.tower.image_size)
    start, end = (marker_id(vocabulary, text) for text in ("<|START_OF_IMG|>", "<|END_OF_IMG|>"))

    def marks(tiles: Tiles) -> list[list[int]]:
        names = [f"TILE_{number}" for number in range(1, tiles.count)] + ["TILE_GLOBAL"]
        first, *others = (vocabulary.encode(name, add_special=False) for name in names)
        return [[start, *first], *others, [end]]

    def cut(image: np.ndarray, param: str) -> Tiles:
        return Tiles(values=image_tiles(image, config), rows=0, columns=0)

    return Preparation(cut, config.digest_text, marker_id(vocabulary, "<image>"), marks)


def open_cohere2_vision(folder: Path, encoder: SiglipEncoder, vocabulary: Vocabulary) -> Preparation:
    """See Preparation. A line break stands behind each tile. Raises ModelError."""
    config, name = read_image_fields(folder, CanvasConfig)
    check(name, config, config.edge, config.resample, encoder)
    start, end, next_line = (
        marker_id(vocabulary, vocabulary.files.special_tokens.get(name, default))
        for name, default in (
            ("boi_token", "<|START_OF_IMG|>"),
            ("eoi_token", "<|END_OF_IMG|>"),
            ("img_line_break_token", "<|IMG_LINE_BREAK|>"),
        )
    )

    def marks(tiles: Tiles) -> list[list[int]]:
        return [[start], *[[next_line]] * (tiles.count - 1), [next_line, end]]

    return Preparation(config.cut, msgspec.json.encode(config), encoder.placeholder_id, marks)


def open_idefics3(folder: Path, encoder: SiglipEncoder, vocabulary: Vocabulary) -> Preparation:
    """See Preparation. A tile's row and column stand before it, newlines between rows. Raises ModelError."""
    config, name = read_image_fields(folder, SplitConfig)
    check(name, config, config.edge, config.resample, encoder)
    around, whole = "<fake_token_around_image>", "<global-img>"
    marker_id(vocabulary, around)

    def marks(tiles: Tiles) -> list[list[int]]:
        texts = [
            ("\n" if row and not column else "") + f"{around}<row_{row + 1}_col_{column + 1}>"
            for row in range(tiles.rows)
            for column in range(tiles.columns)
        ]
        texts += [("\n\n" if texts else "") + around + whole, around]
        return [vocabulary.encode(text, add_special=False) for text in texts]

    return Preparation(config.cut, msgspec.json.encode(config), encoder.placeholder_id, marks)


def check(name: str, config: Normalization, edge: int, resample: int, encoder: SiglipEncoder) -> None:
    """Raises ModelError for tiles of another size than the tower's, and for what is no preparation."""
    size = encoder.tower.image_size
    if edge != size:
        raise ModelError(
            f"{name} makes images of {edge} pixels, and config.json has an image_size of {size}; restore "
            "both from the model's source"
        )
    if min(config.image_std) <= 0 or not 0 <= resample <= 5:
        raise ModelError(
            f"{name} has an image_std of 0 or no known resample; restore it from the model's source"
        )


OPENERS: dict[Layout, Callable[[Path, SiglipEncoder, Vocabulary], Preparation]] = {
    "aya_vision": open_aya_vision,
    "cohere2_vision": open_cohere2_vision,
    "deepseek_vl": open_deepseek_vl,
    "idefics3": open_idefics3,
}


def open_siglip_images(folder: Path, encoder: SiglipEncoder, vocabulary: Vocabulary) -> MarkedTileProcessor:
    """What prepares images, as the model's folder says. Raises ModelError."""
    found = OPENERS[encoder.layout](folder, encoder, vocabulary)
    tokens = TileTokens(
        placeholder_id=found.placeholder_id,
        row_id=encoder.placeholder_id,
        rows_per_tile=encoder.num_rows,
        marks=found.marks,
    )
    return MarkedTileProcessor(tokens, found.cut, found.digest_text)

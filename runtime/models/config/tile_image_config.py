"""preprocessor_config.json of InternVL and Aya Vision, whose images are cut into square tiles. Torch-free."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.models.config.image_config import Normalization, read_image_fields
from runtime.models.config.internvl_config import AuthorsTiles, InternVlEncoder

MAX_TILES = 256
Tiles = Annotated[int, Meta(ge=1, le=MAX_TILES)]


class TileSize(Struct, frozen=True):
    """Height and width of a tile in pixels."""

    height: int = 384
    width: int = 384


class TileImageConfig(Normalization, frozen=True, kw_only=True):
    """How images are prepared, with the defaults of transformers: resized to a grid of tiles whose shape is
    nearest to their own, scaled, normalized. The whole image in the size of a tile comes last."""

    size: TileSize = TileSize()
    resample: int = 3  # Pillow's number of the filter; 3: bicubic
    min_patches: Tiles = 1  # fewest and most tiles of an image
    max_patches: Tiles = 12
    has_whole: bool = True  # the whole image follows several tiles

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Columns and rows of tiles for an image; see nearest_grid."""
        bounds = self.min_patches, self.max_patches
        return nearest_grid(height, width, bounds, self.size.height * self.size.width)

    @property
    def digest_text(self) -> bytes:
        """What tells prepared images of one file apart."""
        return msgspec.json.encode(self)


def nearest_grid(height: int, width: int, bounds: tuple[int, int], tile_pixels: int) -> tuple[int, int]:
    """Columns and rows of tiles for an image: the grid of at least and at most `bounds` tiles whose shape is
    nearest. Of equally near ones a larger one is taken only while it has less than twice the pixels of the
    image."""
    least_count, most = bounds
    grids = sorted(
        (
            (columns, rows)
            for columns in range(1, most + 1)
            for rows in range(1, most + 1)
            if least_count <= columns * rows <= most
        ),
        key=lambda grid: grid[0] * grid[1],
    )
    best, least = (1, 1), float("inf")
    for columns, rows in grids:
        difference = abs(width / height - columns / rows)
        pixels = tile_pixels * columns * rows
        if difference < least or (difference == least and height * width > 0.5 * pixels):
            best, least = (columns, rows), difference
    return best


class AuthorsColors(Struct, frozen=True):
    """Mean and deviation of colors, with those of InternVL's authors."""

    image_mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    image_std: tuple[float, float, float] = (0.229, 0.224, 0.225)


def read_internvl_tiles(folder: Path, encoder: InternVlEncoder) -> TileImageConfig:
    """How the images of InternVL in this folder are prepared for its encoder. Raises ModelError."""
    if encoder.authors is not None:
        return read_authors_tiles(folder, encoder, encoder.authors)
    return read_tile_images(folder, encoder.image_size)


def read_tile_images(folder: Path, image_size: int) -> TileImageConfig:
    """How the images of the model in this folder are prepared for an encoder of tiles of `image_size` x
    `image_size` pixels. Raises ModelError."""
    config, name = read_image_fields(folder, TileImageConfig)
    size = config.size
    if (size.height, size.width) != (image_size,) * 2:
        raise ModelError(
            f"{name} has tiles of {size.width} x {size.height} pixels, and config.json an image_size of "
            f"{image_size}; restore both from the model's source"
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
    return config


def read_authors_tiles(folder: Path, encoder: InternVlEncoder, tiles: AuthorsTiles) -> TileImageConfig:
    """How the images of an InternVLChatModel are prepared: as its config.json says, with the mean and
    deviation of its preprocessor_config.json. Raises ModelError."""
    colors, name = read_image_fields(folder, AuthorsColors)
    if min(colors.image_std) <= 0:
        raise ModelError(f"{name} has an image_std of 0; restore it from the model's source")
    if tiles.most > MAX_TILES or tiles.least > tiles.most:
        raise ModelError(
            f"config.json: min_dynamic_patch {tiles.least} and max_dynamic_patch {tiles.most} must be a "
            f"range up to {MAX_TILES}; restore the file from the model's source"
        )
    return TileImageConfig(
        image_mean=colors.image_mean,
        image_std=colors.image_std,
        size=TileSize(encoder.image_size, encoder.image_size),
        min_patches=tiles.least,
        max_patches=tiles.most,
        has_whole=tiles.has_whole,
    )

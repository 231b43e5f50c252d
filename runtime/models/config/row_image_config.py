"""preprocessor_config.json of Pixtral and Mistral Small 3.1, whose images are rows of patches with a token
behind each. Torch-free."""

import math
from pathlib import Path

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.config_files import decode
from runtime.models.config.image_config import FILES, Normalization, read_image_fields
from runtime.models.config.mistral_params import PARAMS_FILE, Params, tower_of
from runtime.models.config.pixtral_config import PixtralEncoder
from runtime.regular_file import read_regular


class LongestSize(Struct, frozen=True):
    """The greatest size of an image in pixels: its longest edge, or height and width."""

    longest_edge: int = 0
    height: int = 0
    width: int = 0

    @property
    def most(self) -> tuple[int, int]:
        """The greatest height and width."""
        return (self.longest_edge,) * 2 if self.longest_edge else (self.height, self.width)


class RowImageConfig(Normalization, frozen=True, kw_only=True):
    """How images are prepared, with the defaults of Pixtral: made smaller where they are too large, resized
    to whole patches, scaled, normalized."""

    do_resize: bool = True
    size: LongestSize = LongestSize(1024)
    resample: int = 3  # Pillow's number of the filter; 3: bicubic

    def resized(self, height: int, width: int, unit: int) -> tuple[int, int]:
        """Height and width of an image after it was resized to multiples of `unit`."""
        if not self.do_resize:
            return height, width
        most = self.size.most
        ratio = max(height / most[0], width / most[1])
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return -(-height // unit) * unit, -(-width // unit) * unit

    @property
    def digest_text(self) -> bytes:
        """What tells prepared images of one file apart."""
        return msgspec.json.encode(self)


class RowMarks(Struct, frozen=True):
    """processor_config.json: the tokens behind rows, with the defaults of transformers."""

    image_break_token: str = "[IMG_BREAK]"  # behind all rows but the last
    image_end_token: str = "[IMG_END]"  # behind the last


def read_row_images(folder: Path, encoder: PixtralEncoder) -> RowImageConfig:
    """How the images of the model in this folder are prepared for its encoder. Raises ModelError."""
    config, name = _row_config(folder)
    if min(config.size.most) < encoder.unit or min(config.image_std) <= 0 or not 0 <= config.resample <= 5:
        raise ModelError(
            f"{name} has a size of less than {encoder.unit} pixels, an image_std of 0 or no known resample; "
            "restore it from the model's source"
        )
    return config


def _row_config(folder: Path) -> tuple[RowImageConfig, str]:
    """The configuration and the name of its file, which is params.json in Mistral AI's own layout. Raises
    ModelError."""
    path = folder / PARAMS_FILE
    if not any((folder / name).is_file() for name in FILES) and path.is_file():
        tower = tower_of(decode(read_regular(path), Params, PARAMS_FILE))
        if tower is not None:
            return RowImageConfig(size=LongestSize(tower.longest_edge)), PARAMS_FILE
    return read_image_fields(folder, RowImageConfig)


def read_marks(folder: Path) -> RowMarks:
    """The texts of the tokens behind rows. Raises ModelError."""
    path = folder / FILES[0]
    return decode(read_regular(path), RowMarks, path.name) if path.is_file() else RowMarks()

"""preprocessor_config.json of models whose images may have any size, as patches. Torch-free."""

import math
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from runtime.errors import ModelError
from runtime.models.config.image_config import Normalization, read_image_fields
from runtime.models.config.qwen_vl_config import QwenVlEncoder

MAX_STRETCH = 200  # most times that an image is longer than it is wide


class PixelBounds(Struct, frozen=True):
    """The fewest and most pixels of an image when it was resized: areas, whatever their names say."""

    shortest_edge: int = 56 * 56
    longest_edge: int = 28 * 28 * 1280


class PatchImageConfig(Normalization, frozen=True, kw_only=True):
    """How images are prepared, with the defaults of Qwen2-VL: resized to whole patches, scaled,
    normalized."""

    do_resize: bool = True
    size: PixelBounds = PixelBounds()
    min_pixels: int | None = None  # in place of `size`
    max_pixels: int | None = None
    resample: int = 3  # Pillow's number of the filter; 3: bicubic
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and most pixels."""
        least, most = self.min_pixels, self.max_pixels
        return (
            self.size.shortest_edge if least is None else least,
            self.size.longest_edge if most is None else most,
        )

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image after it was resized: multiples of a merged patch near to its own
        size, or to its own shape where that has too few or too many pixels."""
        unit = self.patch_size * self.merge_size
        least, most = self.bounds
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit * unit > most:
            shrink = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit * unit < least:
            stretch = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(side * stretch / unit) for side in (height, width))
        return rows * unit, columns * unit

    @property
    def digest_text(self) -> bytes:
        """What tells prepared images of one file apart."""
        return msgspec.json.encode(self)


def read_patch_images(folder: Path, encoder: QwenVlEncoder) -> PatchImageConfig:
    """How the images of the model in this folder are prepared for its encoder. Raises ModelError."""
    config, name = read_image_fields(folder, PatchImageConfig)
    least, most = config.bounds
    if not 0 < least <= most or min(config.image_std) <= 0 or not 0 <= config.resample <= 5:
        raise ModelError(
            f"{name} has no pixels between its bounds, an image_std of 0 or no known resample; restore it "
            "from the model's source"
        )
    expected = {
        "patch_size": encoder.patch_size,
        "temporal_patch_size": encoder.num_frames,
        "merge_size": encoder.merge_size,
    }
    found = structs.asdict(config)
    for field, size in expected.items():
        if found[field] != size:
            raise ModelError(
                f"{name} has a {field} of {found[field]}, and config.json one of {size}; restore both from "
                "the model's source"
            )
    return config

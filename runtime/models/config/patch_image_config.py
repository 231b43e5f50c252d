"""preprocessor_config.json of models whose images and videos may have any size, as patches. Torch-free."""

import math
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from runtime.errors import ModelError
from runtime.json_value import JsonDict
from runtime.models.config.config_files import decode
from runtime.models.config.image_config import Normalization, read_image_fields
from runtime.models.config.qwen_vl_config import QwenVlEncoder
from runtime.regular_file import read_regular

MAX_STRETCH = 200  # most times that an image is longer than it is wide
MAX_VIDEO_PIXELS = 1 << 25  # of all frames of a video when they were resized
VIDEO_FILE = "video_preprocessor_config.json"


class PixelBounds(Struct, frozen=True):
    """The fewest and most pixels of an image when it was resized: areas, whatever their names say."""

    shortest_edge: int = 56 * 56
    longest_edge: int = 28 * 28 * 1280


VIDEO_BOUNDS = PixelBounds(128 * 28 * 28, 768 * 28 * 28)  # of a frame, where no file says otherwise


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

    def resized(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        """Height and width of an image after it was resized: multiples of a merged patch near to its own
        size, or to its own shape where that has too few or too many pixels. Those of all frames of a video
        are at most MAX_VIDEO_PIXELS, or as few as may be."""
        if not self.do_resize:
            return height, width
        unit = self.patch_size * self.merge_size
        least, most = self.bounds
        most = max(min(most, MAX_VIDEO_PIXELS // num_frames), least)
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
    _check(config, name, encoder)
    return config


def read_patch_videos(folder: Path, encoder: QwenVlEncoder, images: PatchImageConfig) -> PatchImageConfig:
    """How the videos of the model in this folder are prepared: as its images, with other bounds where no file
    speaks of videos. Raises ModelError."""
    raw = video_fields(folder)
    if raw is None:
        return structs.replace(images, size=VIDEO_BOUNDS, min_pixels=None, max_pixels=None)
    config = decode(msgspec.json.encode({"size": VIDEO_BOUNDS} | raw[0]), PatchImageConfig, raw[1])
    _check(config, raw[1], encoder)
    return config


def video_fields(folder: Path) -> tuple[JsonDict, str] | None:
    """What a model's files say of videos, and the name of the file; None: nothing."""
    for name, part in ((VIDEO_FILE, None), ("processor_config.json", "video_processor")):
        if not (folder / name).is_file():
            continue
        fields = decode(read_regular(folder / name), JsonDict, name)
        found = fields if part is None else fields.get(part)
        if isinstance(found, dict):
            return {key: value for key, value in found.items() if value is not None}, name
    return None


def _check(config: PatchImageConfig, name: str, encoder: QwenVlEncoder) -> None:
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

"""preprocessor_config.json of models whose images and videos may have any size, as patches. Torch-free."""

import math
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from runtime.errors import ModelError
from runtime.json_value import JsonDict
from runtime.media_kind import MediaKind
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
    spans_frames: bool = False  # the bounds are of all frames together; an image is as many as a patch takes

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
        unit, depth = self.patch_size * self.merge_size, self.temporal_patch_size
        least, most = self.bounds
        frames = whole = 1  # that the bounds are of, and the same in whole patches
        if self.spans_frames:
            frames, whole = max(num_frames, depth), max(round(num_frames / depth), 1) * depth
            if min(height, width) < unit:
                stretch = unit / min(height, width)
                height, width = int(height * stretch), int(width * stretch)
        most = max(min(most, MAX_VIDEO_PIXELS * frames // max(num_frames, frames)), least)
        rows, columns = round(height / unit), round(width / unit)
        if whole * rows * columns * unit * unit > most:
            shrink = math.sqrt(frames * height * width / most)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif whole * rows * columns * unit * unit < least:
            stretch = math.sqrt(least / (frames * height * width))
            rows, columns = (math.ceil(side * stretch / unit) for side in (height, width))
        return rows * unit, columns * unit

    @property
    def digest_text(self) -> bytes:
        """What tells prepared images of one file apart."""
        return msgspec.json.encode(self)


class PixelRange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pixels of images or frames as --mm-process-config says, in place of the model's files."""

    min_pixels: int | None = None
    max_pixels: int | None = None


OF_THE_FILES = PixelRange()


def pixel_ranges(process_config: JsonDict | None) -> dict[MediaKind, PixelRange]:
    """Bounds of the pixels of images and of frames, as --mm-process-config sets them."""
    given = msgspec.convert(process_config or {}, dict[str, dict[str, float]])
    names = PixelRange.__struct_fields__
    return {
        kind: msgspec.convert(
            {name: int(number) for name, number in given.get(kind.value, {}).items() if name in names},
            PixelRange,
        )
        for kind in (MediaKind.IMAGE, MediaKind.VIDEO)
    }


def read_patch_images(
    folder: Path, encoder: QwenVlEncoder, given: PixelRange = OF_THE_FILES
) -> PatchImageConfig:
    """How the images of the model in this folder are prepared for its encoder. Raises ModelError."""
    config, name = read_image_fields(folder, PatchImageConfig)
    config = _within(config, given)
    _check(config, name, encoder)
    return structs.replace(config, spans_frames=MediaKind.IMAGE in encoder.spanning)


def read_patch_videos(
    folder: Path, encoder: QwenVlEncoder, images: PatchImageConfig, given: PixelRange = OF_THE_FILES
) -> PatchImageConfig:
    """How the videos of the model in this folder are prepared: as its images, with other bounds where no file
    speaks of videos. Raises ModelError."""
    raw, bounds = video_fields(folder), PixelBounds(*encoder.video_bounds)
    if raw is None:
        config = structs.replace(images, size=bounds, min_pixels=None, max_pixels=None)
    else:
        config = decode(msgspec.json.encode({"size": bounds} | raw[0]), PatchImageConfig, raw[1])
    config = _within(config, given)
    _check(config, VIDEO_FILE if raw is None else raw[1], encoder)
    return structs.replace(config, spans_frames=MediaKind.VIDEO in encoder.spanning)


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


def _within(config: PatchImageConfig, given: PixelRange) -> PatchImageConfig:
    """The configuration with the bounds that are given. Raises ModelError where the least is above the
    most."""
    least, most = config.bounds
    least = least if given.min_pixels is None else given.min_pixels
    most = most if given.max_pixels is None else given.max_pixels
    if given != OF_THE_FILES and least > most:
        raise ModelError(
            f"--mm-process-config: min_pixels {least} is above max_pixels {most}; give both, the lesser as "
            "min_pixels"
        )
    return structs.replace(config, min_pixels=least, max_pixels=most)


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

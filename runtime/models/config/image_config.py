"""preprocessor_config.json, or the image part of processor_config.json: how a model's images are prepared.
Torch-free."""

from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.json_value import JsonDict
from runtime.models.config.config_files import decode
from runtime.regular_file import read_regular

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
T = TypeVar("T")
FILES = ("processor_config.json", "preprocessor_config.json")


class Size(Struct, frozen=True):
    """A size in pixels: the shortest edge, or height and width."""

    shortest_edge: int = 0
    height: int = 0
    width: int = 0


class Normalization(Struct, frozen=True, kw_only=True):
    """How pixels become numbers around 0, with CLIP's defaults."""

    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[float, float, float] = CLIP_STD


class ImageConfig(Normalization, frozen=True, kw_only=True):
    """How images are prepared, with CLIP's defaults: resized, cut out of the middle, scaled, normalized."""

    do_resize: bool = True
    size: Size | int = Size(shortest_edge=224)
    resample: int = 3  # Pillow's number of the filter; 3: bicubic
    do_center_crop: bool = True
    crop_size: Size | int | None = None  # None: 224 x 224

    @property
    def crop(self) -> tuple[int, int]:
        """Height and width that are cut out."""
        size = self.crop_size
        if size is None:
            return 224, 224
        return (size, size) if isinstance(size, int) else (size.height, size.width)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image after it was resized."""
        size = self.size
        if isinstance(size, Size) and not size.shortest_edge:
            return size.height, size.width
        short = size if isinstance(size, int) else size.shortest_edge
        long = int(short * max(height, width) / min(height, width))
        return (long, short) if width <= height else (short, long)

    @property
    def digest_text(self) -> bytes:
        """What tells prepared images of one file apart."""
        return msgspec.json.encode(self)


def read_image_config(folder: Path) -> ImageConfig:
    """How the images of the model in this folder are prepared. Raises ModelError."""
    config, name = read_image_fields(folder, ImageConfig)
    check_images(config, name)
    return config


def read_image_fields(folder: Path, kind: type[T]) -> tuple[T, str]:
    """The part of a model's files that says how images are prepared; see `read_processor_fields`."""
    return read_processor_fields(folder, kind, "image_processor")


def read_processor_fields(folder: Path, kind: type[T], part_name: str) -> tuple[T, str]:
    """What a model's files say of how its images or sounds are prepared, as `kind`, and the name of the file:
    preprocessor_config.json, or the part of this name in processor_config.json. Raises ModelError."""
    for name in FILES:
        if not (folder / name).is_file():
            continue
        raw = read_regular(folder / name)
        fields = decode(raw, JsonDict, name)
        if name == FILES[0]:
            if not isinstance(part := fields.get(part_name), dict):
                continue
            raw = msgspec.json.encode(part)
        else:
            raw = msgspec.json.encode(fields)
        return decode(_without_nulls(raw), kind, name), name
    raise ModelError(
        f"{folder} has no preprocessor_config.json, which says how images and sounds are prepared; finish "
        "the download, or set --enable-multimodal false to serve text alone"
    )


def _without_nulls(raw: bytes) -> bytes:
    fields = msgspec.json.decode(raw, type=JsonDict)
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


def check_images(config: ImageConfig, name: str) -> None:
    """Raises ModelError for sizes of 0 and the like. `name`: of the file."""
    size = config.size
    edges = [size] if isinstance(size, int) else [size.shortest_edge or min(size.height, size.width)]
    if config.do_center_crop:
        edges += config.crop
    if min(edges) <= 0 or min(config.image_std) <= 0 or not 0 <= config.resample <= 5:
        raise ModelError(
            f"{name} has a size or image_std of 0, or no known resample; restore it from the model's source"
        )

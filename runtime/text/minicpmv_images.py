"""Images as MiniCPM-V's encoder takes them: the whole image, and slices of larger ones, as patches, with the
arithmetic of transformers' image processor on Pillow."""

import math
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from PIL import Image

from runtime.errors import InvalidRequest, ModelError
from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.image_config import Normalization, read_image_fields
from runtime.models.config.minicpmv_config import MiniCpmVEncoder
from runtime.models.config.patch_image_config import MAX_STRETCH
from runtime.text.image_processor import normalized
from runtime.text.marked_tiles import cut_grid
from runtime.text.marker_tokens import marker_id
from runtime.text.media_prompts import Prepared, check_kind
from runtime.text.patch_image_processor import square_patches
from runtime.text.pictures import picture_of, pixels_of
from runtime.text.vocabulary import Vocabulary

HALVES = (0.5, 0.5, 0.5)
Sides = tuple[float, float]  # height and width


class SliceConfig(Normalization, frozen=True, kw_only=True):
    """How images are prepared, with the defaults of MiniCPM-V 4.6: resized to about `scale_resolution` x
    `scale_resolution` pixels, with slices of that size besides where they have more, scaled, normalized."""

    image_mean: tuple[float, float, float] = HALVES
    image_std: tuple[float, float, float] = HALVES
    resample: int = 3  # Pillow's number of the filter; 3: bicubic
    max_slice_nums: Annotated[int, Meta(ge=1, le=256)] = 9
    scale_resolution: Annotated[int, Meta(ge=1, le=1 << 14)] = 448
    patch_size: Annotated[int, Meta(ge=1, le=1 << 10)] = 14
    slice_mode: bool = True
    downsample_mode: Literal["4x", "16x"] = "16x"
    use_image_id: bool = True  # an image's number stands before it

    @property
    def unit(self) -> int:
        """Height and width in pixels of what becomes one row of the encoding."""
        return self.patch_size * (2 if self.downsample_mode == "4x" else 4)

    def fitted(self, size: Sides, *, is_enlarged: bool) -> tuple[int, int]:
        """Height and width of an image when it was resized; `is_enlarged`: also where it is smaller."""
        height, width = size
        if height * width > self.scale_resolution**2 or is_enlarged:
            shape = width / height
            height = int(self.scale_resolution / math.sqrt(shape))
            width = int(height * shape)
        return nearest_multiple(height, self.unit), nearest_multiple(width, self.unit)

    def grid(self, height: int, width: int) -> tuple[int, int] | None:
        """Rows and columns of slices for an image: the grid whose shape is nearest; None: it has none."""
        most = self.max_slice_nums
        wanted = min(math.ceil(width * height / self.scale_resolution**2), most)
        if not self.slice_mode or wanted <= 1:
            return None
        best, least = (1, 1), math.inf
        for count in (wanted - 1, wanted, wanted + 1):
            for rows in range(1, count + 1) if 1 < count <= most else ():
                if count % rows:
                    continue
                error = abs(math.log(width / height) - math.log(count // rows / rows))
                if error < least or (error == least and rows > best[0]):
                    best, least = (rows, count // rows), error
        return best

    def refined(self, height: int, width: int, grid: tuple[int, int]) -> tuple[int, int]:
        """Height and width of an image that is cut into this grid of slices."""
        part = tuple(
            nearest_multiple(side, count) / count for side, count in zip((height, width), grid, strict=True)
        )
        each = self.fitted((part[0], part[1]), is_enlarged=True)
        return each[0] * grid[0], each[1] * grid[1]


def nearest_multiple(length: float, unit: int) -> int:
    """The multiple of `unit` that is nearest to a length, and at least one."""
    return max(round(length / unit) * unit, unit)


class SliceMarks(Struct, frozen=True, kw_only=True):
    """Tokens among those of an image."""

    image: tuple[int, int]  # before and behind the rows of the whole image
    slice: tuple[int, int]  # and of a slice
    number: tuple[int, int]  # and of the image's number
    newline: list[int]  # between rows of slices


class SliceProcessor:
    """Prepares images for MiniCpmVEncoder; see MediaProcessor."""

    sounds = None
    is_attended = False

    def __init__(
        self,
        encoder: MiniCpmVEncoder,
        config: SliceConfig,
        marks: SliceMarks,
        encode: Callable[[str], list[int]],
    ) -> None:
        """`encode`: makes tokens of numbers."""
        self.placeholder_ids = {MediaKind.IMAGE: encoder.placeholder_id}
        self._kinds, self._row_id = encoder.kinds, encoder.placeholder_id
        self._config, self._marks, self._encode = config, marks, encode
        self._digest_text = msgspec.json.encode(config)

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [patches, 3, patch_size, patch_size], row by row; slices are
        parts of the file."""
        check_kind(media, self._kinds)
        height, width = media.values.shape[1:3]
        if max(height, width) > MAX_STRETCH * min(height, width):
            raise InvalidRequest(
                f"{media.param}: an image of {width} x {height} pixels is too narrow; crop it",
                param=media.param,
            )
        config, marks, grid = self._config, self._marks, self._config.grid(height, width)
        before = [marks.image[0]]
        if config.use_image_id:
            before = [marks.number[0], *self._encode(str(media.image_index)), marks.number[1], *before]
        whole = self._resized(media, config.fitted((height, width), is_enlarged=grid is None))
        slices = () if grid is None else tuple(self._slices(media, grid))
        return self._part(media, whole, 0, before, [marks.image[1]], slices)

    def _slices(self, media: Media, grid: tuple[int, int]) -> Iterator[Prepared]:
        """The slices of an image, row by row."""
        rows, columns = grid
        height, width = media.values.shape[1:3]
        pictures = cut_grid(self._resized(media, self._config.refined(height, width, grid)), rows, columns)
        for index, picture in enumerate(pictures, 1):
            ends_row = index % columns == 0 and index < rows * columns
            behind = [self._marks.slice[1], *(self._marks.newline if ends_row else [])]
            yield self._part(media, picture, index, [self._marks.slice[0]], behind)

    def _resized(self, media: Media, size: tuple[int, int]) -> np.ndarray:
        """uint8 [height, width, 3] of this size."""
        picture = picture_of(media.values[0])
        return pixels_of(picture.resize(size[::-1], Image.Resampling(self._config.resample)))

    def _part(
        self,
        media: Media,
        picture: np.ndarray,
        index: int,
        before: list[int],
        behind: list[int],
        parts: tuple[Prepared, ...] = (),
    ) -> Prepared:
        """The whole image, or slice number `index` of it, uint8 [height, width, 3], between these tokens."""
        config = self._config
        count = picture.shape[0] * picture.shape[1] // config.unit**2
        pixels = normalized(picture.transpose(2, 0, 1), config)
        return Prepared(
            kind=media.kind,
            digest=sha256(b"%b %b %d" % (media.digest, self._digest_text, index)).digest(),
            values=square_patches(pixels, config.patch_size, 1),
            token_ids=[*before, *[self._row_id] * count, *behind],
            positions=np.arange(len(before), len(before) + count, dtype=np.int32),
            grid=(1, picture.shape[0] // config.patch_size, picture.shape[1] // config.patch_size),
            parts=parts,
        )


def open_minicpmv_images(folder: Path, encoder: MiniCpmVEncoder, vocabulary: Vocabulary) -> SliceProcessor:
    """What prepares images, as the model's folder says. Raises ModelError."""
    config, name = read_image_fields(folder, SliceConfig)
    if config.patch_size != encoder.tower.patch_size or config.unit != config.patch_size * encoder.merge_size:
        raise ModelError(
            f"{name} has patches of {config.patch_size} pixels and a downsample_mode of "
            f"{config.downsample_mode}, and config.json others; restore both from the model's source"
        )
    if min(config.image_std) <= 0 or not 0 <= config.resample <= 5:
        raise ModelError(
            f"{name} has an image_std of 0 or no known resample; restore it from the model's source"
        )

    def pair(name: str, text: str) -> tuple[int, int]:
        first, second = (
            marker_id(vocabulary, vocabulary.files.special_tokens.get(f"{name}_{end}_token", default))
            for end, default in (("start", f"<{text}>"), ("end", f"</{text}>"))
        )
        return first, second

    def encode(text: str) -> list[int]:
        return vocabulary.encode(text, add_special=False)

    marks = SliceMarks(
        image=pair("image", "image"),
        slice=pair("slice", "slice"),
        number=pair("image_id", "image_id"),
        newline=encode("\n"),
    )
    return SliceProcessor(encoder, config, marks, encode)

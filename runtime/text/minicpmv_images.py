"""Images and frames of videos as MiniCPM-V's encoder takes them: the whole picture, and slices of larger
ones, as patches, with the arithmetic of transformers' image processor on Pillow."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct, structs
from PIL import Image

from runtime.errors import InvalidRequest, ModelError
from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.config_files import decode
from runtime.models.config.image_config import Normalization, read_image_fields
from runtime.models.config.minicpmv_config import MiniCpmVEncoder
from runtime.models.config.patch_image_config import MAX_STRETCH, video_fields
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
    use_image_id: bool = True  # a file's number stands before it
    stack_frames: int = 1  # frames of a second that become one picture

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


class Piece(Struct, frozen=True, kw_only=True):
    """A picture that is encoded apart, between tokens."""

    pixels: np.ndarray  # uint8 [height, width, 3]
    before: int
    behind: list[int]


class SliceProcessor:
    """Prepares images and videos for MiniCpmVEncoder; see MediaProcessor. Each frame stands in a prompt as an
    image does."""

    sounds = None
    is_attended = False

    def __init__(
        self,
        placeholder_ids: Mapping[MediaKind, int],
        configs: Mapping[MediaKind, SliceConfig],
        marks: SliceMarks,
        encode: Callable[[str], list[int]],
    ) -> None:
        """`placeholder_ids`: which stand for rows, too; `configs`: of the same kinds; `encode`: makes tokens
        of numbers."""
        self.placeholder_ids = placeholder_ids
        self._configs, self._marks, self._encode = configs, marks, encode
        self._kinds = frozenset(placeholder_ids)

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [patches, 3, patch_size, patch_size], row by row; slices and
        frames behind the first are parts of the file."""
        check_kind(media, self._kinds)
        height, width = media.values.shape[1:3]
        if max(height, width) > MAX_STRETCH * min(height, width):
            raise InvalidRequest(
                f"{media.param}: a picture of {width} x {height} pixels is too narrow; crop it",
                param=media.param,
            )
        number: list[int] = []
        if self._configs[MediaKind.IMAGE].use_image_id:
            begin, end = self._marks.number
            number = [begin, *self._encode(str(media.kind_index)), end]
        parts: list[Prepared] = []
        for frame in media.values:
            for piece in self._pieces(media.kind, frame):
                parts.append(self._part(media, piece, len(parts), [] if parts else number))
        first, *others = parts
        return structs.replace(first, parts=tuple(others))

    def _pieces(self, kind: MediaKind, frame: np.ndarray) -> Iterator[Piece]:
        """The whole picture, uint8 [height, width, 3], and its slices, row by row."""
        config, marks = self._configs[kind], self._marks
        height, width = frame.shape[:2]
        grid = config.grid(height, width)
        whole = resized(frame, config.fitted((height, width), is_enlarged=grid is None), config)
        yield Piece(pixels=whole, before=marks.image[0], behind=[marks.image[1]])
        if grid is None:
            return
        rows, columns = grid
        cut = cut_grid(resized(frame, config.refined(height, width, grid), config), rows, columns)
        for index, pixels in enumerate(cut, 1):
            ends_row = index % columns == 0 and index < rows * columns
            behind = [marks.slice[1], *(marks.newline if ends_row else [])]
            yield Piece(pixels=pixels, before=marks.slice[0], behind=behind)

    def _part(self, media: Media, piece: Piece, index: int, number: list[int]) -> Prepared:
        """Piece number `index` of a file, behind the tokens of the file's `number`."""
        config, (height, width) = self._configs[media.kind], piece.pixels.shape[:2]
        count, start = height * width // config.unit**2, len(number) + 1
        digest_text = msgspec.json.encode(config)
        pixels = normalized(piece.pixels.transpose(2, 0, 1), config)
        rows = [self.placeholder_ids[media.kind]] * count
        return Prepared(
            kind=media.kind,
            digest=sha256(b"%b %b %d" % (media.digest, digest_text, index)).digest(),
            values=square_patches(pixels, config.patch_size, 1),
            token_ids=[*number, piece.before, *rows, *piece.behind],
            positions=np.arange(start, start + count, dtype=np.int32),
            grid=(1, height // config.patch_size, width // config.patch_size),
        )


def resized(frame: np.ndarray, size: tuple[int, int], config: SliceConfig) -> np.ndarray:
    """uint8 [height, width, 3] of this height and width."""
    return pixels_of(picture_of(frame).resize(size[::-1], Image.Resampling(config.resample)))


def open_minicpmv_images(folder: Path, encoder: MiniCpmVEncoder, vocabulary: Vocabulary) -> SliceProcessor:
    """What prepares images and videos, as the model's folder says. Raises ModelError."""
    images, name = read_image_fields(folder, SliceConfig)
    check(images, name, encoder)
    configs, placeholder_ids = {MediaKind.IMAGE: images}, {MediaKind.IMAGE: encoder.placeholder_id}
    if encoder.video_placeholder_id is not None:
        configs[MediaKind.VIDEO] = read_videos(folder, images, encoder)
        placeholder_ids[MediaKind.VIDEO] = encoder.video_placeholder_id
    marks = read_marks(vocabulary)
    return SliceProcessor(placeholder_ids, configs, marks, partial(vocabulary.encode, add_special=False))


def read_videos(folder: Path, images: SliceConfig, encoder: MiniCpmVEncoder) -> SliceConfig:
    """How frames are prepared: as images, where no file speaks of videos. Raises ModelError."""
    raw = video_fields(folder)
    if raw is None:
        return images
    config = decode(msgspec.json.encode(raw[0]), SliceConfig, raw[1])
    check(config, raw[1], encoder)
    if config.stack_frames > 1:
        raise ModelError(
            f"{raw[1]}: stack_frames {config.stack_frames} puts frames of a second into one picture, which "
            "is not supported; set it to 1"
        )
    return config


def check(config: SliceConfig, name: str, encoder: MiniCpmVEncoder) -> None:
    """Raises ModelError for pictures that the tower does not take, and for what is no preparation."""
    if config.patch_size != encoder.tower.patch_size or config.unit != config.patch_size * encoder.merge_size:
        raise ModelError(
            f"{name} has patches of {config.patch_size} pixels and a downsample_mode of "
            f"{config.downsample_mode}, and config.json others; restore both from the model's source"
        )
    if min(config.image_std) <= 0 or not 0 <= config.resample <= 5:
        raise ModelError(
            f"{name} has an image_std of 0 or no known resample; restore it from the model's source"
        )


def read_marks(vocabulary: Vocabulary) -> SliceMarks:
    """The tokens among those of a picture. Raises ModelError."""

    def pair(name: str, text: str) -> tuple[int, int]:
        first, second = (
            marker_id(vocabulary, vocabulary.files.special_tokens.get(f"{name}_{end}_token", default))
            for end, default in (("start", f"<{text}>"), ("end", f"</{text}>"))
        )
        return first, second

    return SliceMarks(
        image=pair("image", "image"),
        slice=pair("slice", "slice"),
        number=pair("image_id", "image_id"),
        newline=vocabulary.encode("\n", add_special=False),
    )

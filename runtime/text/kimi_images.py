"""Images of any size as patches for MoonViT (Kimi-VL, Kimi K2.5), with the arithmetic of their image
processors on Pillow."""

import math
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from PIL import Image

from runtime.errors import InvalidRequest, ModelError
from runtime.json_value import JsonDict
from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.config_files import decode
from runtime.models.config.image_config import CLIP_MEAN, CLIP_STD, Normalization, read_image_fields
from runtime.models.config.kimi_vision_config import KimiEncoder
from runtime.models.config.patch_image_config import MAX_STRETCH
from runtime.text.image_processor import normalized
from runtime.text.media_prompts import Prepared, check_kind
from runtime.text.patch_image_processor import square_patches
from runtime.text.pictures import picture_of, pixels_of

HALVES = (0.5, 0.5, 0.5)
Means = tuple[float, float, float]


class HfSides(Struct, frozen=True):
    """The most patches of a side, as transformers names them."""

    max_height: int = 512
    max_width: int = 512


class HfKimiImages(Struct, frozen=True):
    """preprocessor_config.json of Kimi-VL, of Kimi K2.5, and as transformers writes it."""

    media_proc_cfg: JsonDict | None = None  # all of it, in Kimi K2.5's own file
    in_patch_limit: int | None = None  # of Kimi K2.5's own file
    in_token_limit: int | None = None  # of Kimi-VL's
    max_patches: int = 16384
    merge_kernel_size: int | list[int] | None = None
    merge_size: int = 2
    patch_limit_on_one_side: int | None = None
    size: HfSides = HfSides()
    patch_size: int = 14
    resample: int = 3
    image_mean: Means | None = None
    image_std: Means | None = None
    pad_input: bool | None = None


class KimiImageConfig(Normalization, frozen=True, kw_only=True):
    """How images are prepared: made smaller where they have too many patches, filled up with black to whole
    rows of the encoding, scaled, normalized."""

    resample: int  # Pillow's number of the filter
    patch_size: int
    merge_size: int
    max_patches: int  # of an image
    max_side: int  # patches of a side

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image after it was made smaller."""
        patch, most = self.patch_size, self.max_side * self.patch_size
        count = max(height // patch, 1) * max(width // patch, 1)
        scale = min(1.0, math.sqrt(self.max_patches / count), most / height, most / width)
        return min(max(int(height * scale), 1), most), min(max(int(width * scale), 1), most)

    def filled(self, height: int, width: int) -> tuple[int, int]:
        """The multiples of a row of the encoding that this height and width fit in."""
        unit = self.patch_size * self.merge_size
        return -(-height // unit) * unit, -(-width // unit) * unit


def read_kimi_images(folder: Path, encoder: KimiEncoder) -> KimiImageConfig:
    """How the images of the model in this folder are prepared for its encoder. Raises ModelError."""
    hf, name = read_image_fields(folder, HfKimiImages)
    if hf.media_proc_cfg is not None:
        own = {key: value for key, value in hf.media_proc_cfg.items() if value is not None}
        hf = decode(msgspec.json.encode(own), HfKimiImages, f"{name}: media_proc_cfg")
    is_kimi_vl = hf.in_token_limit is not None
    if hf.pad_input is False or (is_kimi_vl and hf.pad_input is None):
        raise ModelError(f"{name}: pad_input false, which cuts images off, is not supported; set it to true")
    merge = hf.merge_size if hf.merge_kernel_size is None else hf.merge_kernel_size
    config = KimiImageConfig(
        image_mean=hf.image_mean or (CLIP_MEAN if is_kimi_vl else HALVES),
        image_std=hf.image_std or (CLIP_STD if is_kimi_vl else HALVES),
        resample=hf.resample,
        patch_size=hf.patch_size,
        merge_size=merge if isinstance(merge, int) else next(iter(merge), 0),
        max_patches=hf.in_patch_limit or hf.in_token_limit or hf.max_patches,
        max_side=hf.patch_limit_on_one_side or min(hf.size.max_height, hf.size.max_width),
    )
    if (config.patch_size, config.merge_size) != (encoder.patch_size, encoder.merge_size):
        raise ModelError(
            f"{name} has patches of {config.patch_size} pixels of which {config.merge_size} x "
            f"{config.merge_size} are joined, and config.json {encoder.patch_size} and {encoder.merge_size}; "
            "restore both from the model's source"
        )
    if min(*config.image_std, config.max_patches, config.max_side) <= 0 or not 0 <= config.resample <= 5:
        raise ModelError(
            f"{name} has an image_std or a limit of 0, or no known resample; restore it from the model's "
            "source"
        )
    return config


class KimiImageProcessor:
    """Prepares images for KimiEncoder; see MediaProcessor."""

    sounds = None
    is_attended = False

    def __init__(self, encoder: KimiEncoder, config: KimiImageConfig) -> None:
        self.placeholder_ids = {MediaKind.IMAGE: encoder.placeholder_id}
        self._encoder, self._config = encoder, config
        self._digest_text = msgspec.json.encode(config)

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [patches, 3, patch_size, patch_size], with the patches of
        one row of the encoding side by side."""
        check_kind(media, self._encoder.kinds)
        config, image = self._config, media.values[0]
        height, width = image.shape[:2]
        if max(height, width) > MAX_STRETCH * min(height, width):
            raise InvalidRequest(
                f"{media.param}: an image of {width} x {height} pixels is too narrow; crop it",
                param=media.param,
            )
        size = config.resized(height, width)
        if size != (height, width):
            resample = Image.Resampling(config.resample)
            image = pixels_of(picture_of(image).resize(size[::-1], resample))
        whole = np.zeros((*config.filled(*size), 3), np.uint8)
        whole[: size[0], : size[1]] = image
        pixels = normalized(whole.transpose(2, 0, 1), config)
        rows, columns = (side // config.patch_size for side in whole.shape[:2])
        count = rows * columns // config.merge_size**2
        return Prepared(
            kind=media.kind,
            digest=sha256(media.digest + self._digest_text).digest(),
            values=square_patches(pixels, config.patch_size, config.merge_size),
            token_ids=[self._encoder.placeholder_id] * count,
            positions=np.arange(count, dtype=np.int32),
            grid=(1, rows, columns),
        )

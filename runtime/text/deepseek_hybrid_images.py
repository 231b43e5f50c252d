"""Images as the encoder of DeepSeek-VL 7B takes them: in two sizes, with the arithmetic of transformers'
image processor on Pillow."""

from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.deepseek_hybrid_config import DeepSeekHybridEncoder
from runtime.models.config.image_config import CLIP_MEAN, CLIP_STD, Normalization, Size, read_image_fields
from runtime.text.image_processor import normalized
from runtime.text.media_prompts import Prepared, check_kind
from runtime.text.siglip_images import squared

Means = tuple[float, float, float]


class HybridImageConfig(Normalization, frozen=True, kw_only=True):
    """How images are prepared, with the defaults of transformers: squares of the mean colour, of which the
    small one is made of the large one, scaled, normalized."""

    size: Size = Size(height=384, width=384)
    resample: int = 3  # Pillow's number of the filter; 3: bicubic
    min_size: Annotated[int, Meta(ge=1)] = 14  # pixels of the shorter side
    high_res_size: Size = Size(height=1024, width=1024)
    high_res_resample: int = 3
    high_res_image_mean: Means = CLIP_MEAN
    high_res_image_std: Means = CLIP_STD

    def versions(self, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """uint8 [height, width, 3] -> the large and the small one, float32 [3, size, size]."""
        mean = self.high_res_image_mean
        large = squared(image, self.high_res_size.height, self.min_size, self.high_res_resample, mean)
        small = squared(large, self.size.height, self.min_size, self.resample, self.image_mean)
        own = msgspec.structs.replace(
            self, image_mean=self.high_res_image_mean, image_std=self.high_res_image_std
        )
        return normalized(large.transpose(2, 0, 1), own), normalized(small.transpose(2, 0, 1), self)


class HybridImageProcessor:
    """Prepares images for DeepSeekHybridEncoder; see MediaProcessor."""

    sounds = None
    is_attended = False

    def __init__(self, encoder: DeepSeekHybridEncoder, config: HybridImageConfig) -> None:
        self.placeholder_ids = {MediaKind.IMAGE: encoder.placeholder_id}
        self._encoder, self._config = encoder, config

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [N]: the pixels of the large one, then of the small one."""
        check_kind(media, self._encoder.kinds)
        count = self._encoder.num_rows
        versions = self._config.versions(media.values[0])
        return Prepared(
            kind=media.kind,
            digest=sha256(media.digest + msgspec.json.encode(self._config)).digest(),
            values=np.concatenate([one.ravel() for one in versions]),
            token_ids=[self._encoder.placeholder_id] * count,
            positions=np.arange(count, dtype=np.int32),
        )


def open_hybrid_images(folder: Path, encoder: DeepSeekHybridEncoder) -> HybridImageProcessor:
    """What prepares images, as the model's folder says. Raises ModelError."""
    config, name = read_image_fields(folder, HybridImageConfig)
    found = config.high_res_size.height, config.size.height
    wanted = encoder.sam.image_size, encoder.tower.image_size
    if found != wanted:
        raise ModelError(
            f"{name} makes images of {found[0]} and {found[1]} pixels, and config.json has towers for "
            f"{wanted[0]} and {wanted[1]}; restore both from the model's source"
        )
    resamples = config.resample, config.high_res_resample
    if (
        min(*config.image_std, *config.high_res_image_std) <= 0
        or not 0 <= min(resamples) <= max(resamples) <= 5
    ):
        raise ModelError(
            f"{name} has an image_std of 0 or no known resample; restore it from the model's source"
        )
    return HybridImageProcessor(encoder, config)

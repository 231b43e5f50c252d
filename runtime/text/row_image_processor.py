"""Images of any size as rows of patches for Pixtral's tower, with the arithmetic of transformers' image
processor on Pillow."""

from hashlib import sha256

import numpy as np
from PIL import Image

from runtime.errors import InvalidRequest
from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.pixtral_config import PixtralEncoder
from runtime.models.config.row_image_config import RowImageConfig
from runtime.text.image_processor import normalized
from runtime.text.media_prompts import Prepared, check_kind
from runtime.text.pictures import picture_of, pixels_of


class RowImageProcessor:
    """Prepares images for PixtralEncoder; see MediaProcessor. Behind the tokens of each row of the encoding
    stands one that breaks or ends the image, which takes no row of it."""

    sounds = None
    is_attended = False

    def __init__(self, encoder: PixtralEncoder, config: RowImageConfig, break_id: int, end_id: int) -> None:
        self.placeholder_ids = {MediaKind.IMAGE: encoder.placeholder_id}
        self._encoder, self._config = encoder, config
        self._break_id, self._end_id = break_id, end_id

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [3, height, width]."""
        check_kind(media, self._encoder.kinds)
        config, unit = self._config, self._encoder.unit
        image = media.values[0]
        height, width = config.resized(image.shape[0], image.shape[1], unit)
        if not height or not width or height % unit or width % unit:
            raise InvalidRequest(
                f"{media.param}: an image of {image.shape[1]} x {image.shape[0]} pixels is too narrow, or no "
                f"multiple of {unit} pixels where the model resizes none; crop or resize it",
                param=media.param,
            )
        if image.shape[:2] != (height, width):
            image = pixels_of(picture_of(image).resize((width, height), Image.Resampling(config.resample)))
        rows, columns = height // unit, width // unit
        row = [self._encoder.placeholder_id] * columns
        return Prepared(
            kind=media.kind,
            digest=sha256(media.digest + config.digest_text).digest(),
            values=normalized(image.transpose(2, 0, 1), config),
            token_ids=[*(row + [self._break_id]) * (rows - 1), *row, self._end_id],
            positions=np.flatnonzero(np.arange(rows * (columns + 1)) % (columns + 1) < columns).astype(
                np.int32
            ),
        )

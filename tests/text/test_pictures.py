"""Arrays as images and back, in one piece and in strips."""

import numpy as np
import pytest
from PIL import Image

from runtime.text.pictures import STRIP_PIXELS, picture_of, pixels_of


@pytest.mark.parametrize(
    ("height", "width"),
    [
        (1, 1),
        (24, 40),
        (STRIP_PIXELS // 64, 64),
        (STRIP_PIXELS // 64 + 1, 64),
        (700, 900),
        (3, STRIP_PIXELS + 1),
    ],
)
def test_pixels_are_those_of_pillow(height: int, width: int) -> None:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    picture = picture_of(values)
    assert np.array_equal(pixels_of(picture), values)
    for resample in (Image.Resampling.BICUBIC, Image.Resampling.LANCZOS, Image.Resampling.BILINEAR):
        expected = np.asarray(Image.fromarray(values).resize((31, 17), resample))
        assert np.array_equal(pixels_of(picture.resize((31, 17), resample)), expected)

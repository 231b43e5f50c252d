"""Arrays as Pillow's images, and back. Pillow copies pixels with the interpreter's lock held, so what is
large goes in strips: other threads run between them (gil.py)."""

import numpy as np
from PIL import Image

from runtime.gil import give_way

STRIP_PIXELS = 1 << 18  # copied at once: 0.15 ms


def picture_of(values: np.ndarray) -> Image.Image:
    """uint8 RGB [height, width, 3] as an image."""
    height, width, _ = values.shape
    rows = max(STRIP_PIXELS // width, 1)
    if height <= rows:
        return Image.fromarray(values)
    picture = Image.new("RGB", (width, height), None)  # type: ignore[arg-type]
    for top in range(0, height, rows):
        picture.paste(Image.fromarray(values[top : top + rows]), (0, top))
        give_way()
    return picture


def pixels_of(picture: Image.Image) -> np.ndarray:
    """uint8 [height, width, 3] of an RGB image."""
    width, height = picture.size
    rows = max(STRIP_PIXELS // width, 1)
    if height <= rows:
        return np.asarray(picture)
    values = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        values[top:bottom] = np.asarray(picture.crop((0, top, width, bottom)))
        give_way()
    return values

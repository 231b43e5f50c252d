"""Arrays as Pillow's images, and back. Pillow copies and clears pixels with the interpreter's lock held, 10
ms of a picture of 3840 x 2160, so numpy does it, which lets other threads run meanwhile."""

import numpy as np
from PIL import Image

from runtime.gil import give_way

STRIP_PIXELS = 1 << 18  # that Pillow copies at once: 0.15 ms


def picture_of(values: np.ndarray) -> Image.Image:
    """uint8 RGB [height, width, 3] as an image of mode RGBX, which is how Pillow itself keeps RGB."""
    height, width, bands = values.shape
    padded = np.zeros((height, width, 4), np.uint8)
    for band in range(bands):
        padded[:, :, band] = values[:, :, band]
    return Image.frombuffer("RGBX", (width, height), padded, "raw", "RGBX", 0, 1)


def pixels_of(picture: Image.Image) -> np.ndarray:
    """uint8 [height, width, 3] of an image of mode RGBX."""
    width, height = picture.size
    values = np.empty((height, width, 3), np.uint8)
    rows = max(STRIP_PIXELS // width, 1)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        values[top:bottom] = np.asarray(picture.crop((0, top, width, bottom)))[:, :, :3]
        give_way()
    return values

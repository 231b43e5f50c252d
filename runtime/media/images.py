"""Images, by Pillow: as the one that took or drew them meant them to be seen, in RGB."""

import warnings

import numpy as np
from PIL import Image, ImageOps

from runtime.media.decode_messages import DecodeError, File
from runtime.media.settings import DecodeLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
HEIF = "HEIF"  # of phones' HEIC files, where pi-heif is installed
HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"mif1", b"msf1")  # ISO/IEC 23008-12, 10
_HIGH = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")  # modes of more than 8 bits


def decode_image(file: File, limits: DecodeLimits) -> np.ndarray:
    """uint8 RGB [1, height, width, 3] of an image, turned as its EXIF says; of an animation, the first frame;
    what is transparent, over white. Raises DecodeError, and MemoryError."""
    Image.MAX_IMAGE_PIXELS = None  # the size is checked here, before pixels are read
    try:
        with warnings.catch_warnings(), Image.open(file, formats=_formats(file)) as image:
            warnings.simplefilter("ignore")  # of damaged metadata
            _check(image.width, image.height, limits)
            image.load()
            values = np.asarray(_rgb(ImageOps.exif_transpose(image)))
    except (DecodeError, ImportError, MemoryError):
        raise
    except Image.UnidentifiedImageError:
        raise DecodeError(f"is none of {', '.join(FORMATS)} and HEIC") from None
    except Exception as error:  # Pillow raises a dozen kinds for damaged files
        raise DecodeError(f"is a damaged image: {error}") from None
    return values[None]


def _formats(file: File) -> tuple[str, ...]:
    """The formats that a file may have. Raises ImportError for HEIC without pi-heif."""
    head = file.read(12)
    file.seek(0)
    if head[4:8] != b"ftyp" or head[8:12] not in HEIF_BRANDS:
        return FORMATS
    import pi_heif

    pi_heif.register_heif_opener(thumbnails=False, decode_threads=1)
    return (HEIF,)


def _check(width: int, height: int, limits: DecodeLimits) -> None:
    if width * height > limits.max_pixels:
        raise DecodeError(f"has {width} x {height} pixels; send {limits.max_pixels} at most")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in _HIGH:
        image = _eight_bits(image)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """A grey image of 8 bits: Pillow would cut brighter values off instead of scaling them."""
    values = np.asarray(image)
    if values.dtype == np.float32:
        return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    return Image.fromarray((np.clip(values, 0, 65535) >> 8).astype(np.uint8))

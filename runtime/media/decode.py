"""Decodes one file: from a descriptor to an array and what is known of it."""

import binascii
import hashlib
import io
import os

import numpy as np
from msgspec import structs

from runtime.errors import install_line
from runtime.media.decode_messages import DecodeError, DecodeRequest, DecodeResult, File
from runtime.memory_file import read_at
from runtime.messages.media import MediaKind


def decode_file(fd: int, request: DecodeRequest) -> tuple[DecodeResult, np.ndarray]:
    """What the file holds, and its array as messages/media.py's Media.values. Raises DecodeError, and
    MemoryError."""
    with os.fdopen(fd, "rb") as opened:
        text = request.text
        file: File = opened if text is None else io.BytesIO(_decoded(read_at(fd, text.begin, text.end)))
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").digest()
        file.seek(0)
        try:
            result, values = _DECODERS[request.kind](file, request)
        except ImportError as error:
            extra = "heif" if error.name == "pi_heif" else "media"
            raise DecodeError(
                f"needs {error.name}, which is not installed on this server: {install_line(extra)}"
            ) from None
    if values.nbytes > request.limits.max_value_bytes:
        raise DecodeError(f"has over {request.limits.max_value_bytes} bytes when it is decoded")
    return structs.replace(result, digest=digest, shape=values.shape), values


def _decoded(text: bytes) -> bytes:
    """The bytes that base64 stands for; its padding may be missing, and line breaks are left out."""
    text = text.translate(None, b" \t\r\n").rstrip(b"=")
    if b"-" in text or b"_" in text:  # RFC 4648 section 5: for URLs
        text = text.translate(bytes.maketrans(b"-_", b"+/"))
    try:
        return binascii.a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True)
    except binascii.Error:
        raise DecodeError("is not base64") from None


def _image(file: File, request: DecodeRequest) -> tuple[DecodeResult, np.ndarray]:
    from runtime.media.images import decode_image

    return DecodeResult(), decode_image(file, request.limits)


def _video(file: File, request: DecodeRequest) -> tuple[DecodeResult, np.ndarray]:
    from runtime.media.videos import decode_video

    frames = decode_video(file, request.limits)
    return DecodeResult(rate=frames.rate, frame_times_s=frames.times_s), frames.values


def _audio(file: File, request: DecodeRequest) -> tuple[DecodeResult, np.ndarray]:
    from runtime.media.sounds import decode_sound

    values, rate = decode_sound(file, request.limits)
    return DecodeResult(rate=rate), values


_DECODERS = {MediaKind.IMAGE: _image, MediaKind.VIDEO: _video, MediaKind.AUDIO: _audio}

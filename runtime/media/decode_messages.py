"""What the event loop and the decode process say to each other. Files and arrays go as descriptors, next to
these messages."""

from io import BufferedReader, BytesIO

from msgspec import Struct

from runtime.media.settings import DecodeLimits
from runtime.messages.media import MediaKind

MAX_MESSAGE_BYTES = 64 << 10

File = BufferedReader | BytesIO  # what decoders read


class TextPlace(Struct, frozen=True, array_like=True):
    """Where the base64 of a media file stands in another file."""

    begin: int
    end: int


class DecodeRequest(Struct, frozen=True, array_like=True):
    """A request to decode a file within `limit_s`. `text`: where its base64 stands; None: it is no text."""

    kind: MediaKind
    text: TextPlace | None
    limit_s: float
    limits: DecodeLimits


class DecodeResult(Struct, frozen=True, array_like=True):
    """Fields of messages/media.py's Media; or, in `error`, what is wrong with the file."""

    error: str = ""
    is_fault: bool = False  # the error is the server's, not the file's
    digest: bytes = b""
    shape: tuple[int, ...] = ()
    rate: float = 0.0
    frame_times_s: tuple[float, ...] = ()


class DecodeError(Exception):
    """A file cannot be decoded; the message completes "the file ..."."""

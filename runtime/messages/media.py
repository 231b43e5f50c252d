"""Images, videos and sounds of a prompt: as a client named them, decoded, and as an encoder's input.

client ─ MediaSource ─► runtime/media (fetch, decode) ─ Media ─► tokenizer ─ MediaInput ─► scheduler ─► ranks
"""

import numpy as np
from msgspec import Struct

from runtime.messages.media_kind import MediaKind


class MediaSource(Struct, frozen=True, kw_only=True):
    """One image, video or sound as a client named it: by an address, or the file itself."""

    kind: MediaKind
    param: str  # the field that named it, for errors: messages[0].content[1].image_url
    url: str = ""  # data:, http:, https: or file:; "": `base64` or `data` is the file
    data: bytes = b""
    base64: str = ""  # the file in base64, as a client sent it; "": `url` or `data` names it


class Media(Struct, frozen=True, kw_only=True):
    """A decoded file."""

    kind: MediaKind
    param: str  # as in MediaSource.param
    digest: bytes  # SHA-256 of the file's bytes
    # IMAGE: uint8 RGB [1, height, width, 3]; VIDEO: [frames, height, width, 3]; AUDIO: float32 [samples],
    # mono
    values: np.ndarray
    rate: float = 0.0  # AUDIO: samples a second; VIDEO: frames a second of the file
    frame_times_s: tuple[float, ...] = ()  # VIDEO: when each of the frames is shown


class MediaInput(Struct, frozen=True, kw_only=True):
    """What a model's encoder is given for one file, and the prompt tokens that its output stands for."""

    kind: MediaKind
    digest: bytes  # SHA-256 of the file and of how it was prepared: equal digests have equal encodings
    start: int  # position of its first token in the prompt
    positions: np.ndarray  # int32 [tokens]: offsets from `start` of the tokens that take an encoded row each
    values: np.ndarray  # float32: patches or mel features, in the shape that the encoder declares
    grid: tuple[int, int, int] = (1, 1, 1)  # frames, rows and columns of patches

"""What the server and the preparation process say to each other. Arrays go as descriptors of memory without a
name, next to these messages."""

from collections.abc import Mapping
from typing import get_args

import msgspec
import numpy as np
from msgspec import Struct

from runtime.media_kind import MediaKind
from runtime.messages.media import TokenGrid
from runtime.models.config.media_config import MediaConfig
from runtime.models.config.patch_image_config import PixelRange

MAX_MESSAGE_BYTES = 64 << 10
_ENCODERS = {one.__name__: one for one in get_args(MediaConfig)}


class PrepareSetup(Struct, frozen=True, kw_only=True):
    """The first message to the process: the model whose files it prepares, as `open_processor` takes it.
    Questions answer it, and Opened."""

    folder: str
    encoder_name: str  # class of the encoder's configuration
    encoder: bytes  # the configuration
    pixels: Mapping[MediaKind, PixelRange]
    special_tokens: Mapping[str, str]  # as TokenizerFiles.special_tokens

    @property
    def media_config(self) -> MediaConfig:
        """The encoder's configuration."""
        found: MediaConfig = msgspec.msgpack.decode(self.encoder, type=_ENCODERS[self.encoder_name])
        return found


class FileHead(Struct, frozen=True, kw_only=True, array_like=True):
    """A decoded file without its array: fields of messages/media.py's Media."""

    kind: MediaKind
    param: str
    digest: bytes
    shape: tuple[int, ...]
    rate: float
    frame_times_s: tuple[float, ...]
    num_images: int
    kind_index: int

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.float32]:
        """Type of the array's numbers."""
        return np.dtype(np.float32) if self.kind is MediaKind.AUDIO else np.dtype(np.uint8)


class Question(Struct, frozen=True, array_like=True, tag="question"):
    """Asks for the token of this name, or for the tokens of this text without special ones."""

    text: str
    is_name: bool


class Answer(Struct, frozen=True, array_like=True):
    """The tokens; None: there is no token of this name. `error`: why texts have no tokens here."""

    ids: list[int] | None
    error: str = ""


class Opened(Struct, frozen=True, array_like=True, tag="opened"):
    """The process has opened the model's processor, and takes files."""


class PrepareFile(Struct, frozen=True, kw_only=True, array_like=True):
    """A request to prepare a file. Its socket for the answer, its array, and that of its sound come with it
    as descriptors."""

    file: FileHead
    sound: FileHead | None
    known: list[tuple[Question, Answer]]  # of earlier files


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """The file is prepared: its arrays lie in the memory that comes with this, and behind them, from byte
    `head_at` on, a PreparedHead."""

    head_at: int


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """The file cannot be prepared. `is_fault`: the server is to blame."""

    message: str
    param: str | None
    is_fault: bool = False


FromChild = Question | Done | Refused
FromProcess = Question | Opened


class ArrayPlace(Struct, frozen=True, array_like=True):
    """Where an array lies in the memory."""

    begin: int  # bytes
    shape: tuple[int, ...]


class PreparedHead(Struct, frozen=True, kw_only=True, array_like=True):
    """Fields of media_prompts.py's Prepared, its arrays by their places."""

    kind: MediaKind
    digest: bytes
    values: ArrayPlace  # float32
    positions: ArrayPlace  # int32
    token_ids: list[int]
    grid: tuple[int, int, int]
    token_grids: tuple[TokenGrid, ...]
    frame_step: float
    replaced: tuple[int, ...]
    around: tuple[str, ...]
    joined: list[tuple[int, int, int]]  # pairs of tokens, and the one that they are together
    parts: "tuple[PreparedHead, ...]"
    inner: "tuple[PreparedHead, ...]"

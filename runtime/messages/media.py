"""Images, videos and sounds of a prompt: as a client named them, decoded, and as an encoder's input.

client ─ MediaSource ─► runtime/media (fetch, decode) ─ Media ─► tokenizer ─ MediaInput ─► scheduler ─► ranks
"""

import os

import numpy as np
from msgspec import Struct

from runtime.media_kind import MediaKind
from runtime.memory_file import MemoryFile


class SoundLimits(Struct, frozen=True, kw_only=True):
    """Sounds that a model takes."""

    rate: int  # samples a second
    max_s: float  # seconds of the longest
    is_cut: bool = False  # longer ones are cut into several requests
    hop_length: int = 0  # of a model that transcribes: samples from one frame of a spectrogram to the next


class TranscriptionFacts(Struct, frozen=True, kw_only=True):
    """How a model transcribes sounds."""

    rate: int  # samples a second
    longest_s: float  # seconds that it takes at once
    suppressed: tuple[int, ...] = ()  # tokens that no text has
    has_languages: bool = True  # it knows more than English
    alignment: "AlignmentFacts | None" = None  # None: times of words are not known


class AlignmentFacts(Struct, frozen=True):
    """How times of words are found."""

    heads: tuple[tuple[int, int], ...]  # layer and head, of the decoder's heads that follow the sound
    filter_width: int  # positions of a median filter, odd
    samples: int  # of a position of the sound's encoding, at the model's rate

    def num_positions(self, num_samples: int) -> int:
        """Positions of a sound, without the silence behind it."""
        return max(-(-2 * num_samples // self.samples) // 2, 1)


class EncodedText(Struct, frozen=True):
    """A file in base64, which is a part of a request's body."""

    memory: MemoryFile  # the body, sealed
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the text."""
        return self.end - self.begin

    def read(self) -> bytes:
        """The text."""
        return self.memory.read(self.begin, self.end)


class MediaSource(Struct, frozen=True, kw_only=True):
    """One image, video or sound as a client named it: by an address, or the file itself."""

    kind: MediaKind
    param: str  # the field that named it, for errors: messages[0].content[1].image_url
    url: str = ""  # data:, http:, https: or file:; "": `base64` or `data` is the file
    data: bytes = b""
    base64: str = ""  # the file in base64, as a client sent it; "": `url` or `data` names it
    encoded: EncodedText | None = None  # `url` is the head of a data: URL then, or ""
    decoded: "Media | None" = None  # in place of all of these
    has_sound: bool = False  # VIDEO: its sound is wanted, too


class SharedMemory:
    """A descriptor of the memory that an array lies in, which other processes may be given. It is open as
    long as this lives."""

    def __init__(self, fd: int, values: np.ndarray) -> None:
        """`values`: all of the memory."""
        self.fd, self.values = fd, values

    def __del__(self) -> None:
        os.close(self.fd)


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
    num_images: int = 1  # IMAGE: of its prompt, with this one
    kind_index: int = 0  # how many files of its kind stand before it
    sound: "Media | None" = None  # VIDEO: what is heard in it, where that is wanted
    loaded: "MediaLoad | None" = None  # what loading it took; None: it came as an array
    memory: SharedMemory | None = None  # that the array came in; None: it is in this process alone

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.values.nbytes + (0 if self.sound is None else self.sound.values.nbytes)


class MediaLoad(Struct, frozen=True, array_like=True):
    """What loading one file took. Times are those of the monotonic clock."""

    num_bytes: int  # of the file; of base64 the bytes of the text
    begin_s: float
    fetched_s: float  # all bytes were there
    decode_s: float  # a decoder had its turn
    end_s: float


class MediaUsage(Struct, frozen=True):
    """What the images, videos and sounds of a prompt took."""

    tokens: dict[MediaKind, int]  # of the prompt that take rows of encodings
    cached_tokens: dict[MediaKind, int]  # of these, found in the prefix cache
    num_inputs: int  # that are encoded apart: files, or parts of them
    num_encoded: int  # of these, encoded for this prompt
    encode_s: float  # seconds of the encoder, shared out by rows


class TokenGrid(Struct, frozen=True, array_like=True):
    """Tokens that stand in a grid of frames, rows and columns: a token's rotary positions are the position
    that the first one would have in a text, and in each direction its place in the grid."""

    offset: int  # of the first token from MediaInput.start
    frames: int
    rows: int
    columns: int
    back: int = 0  # positions that the grid begins before that of a text
    time: int = 0  # position of its first frame in the grid
    advance: int = (
        -1
    )  # positions from there to what follows the grid; -1: it follows the greatest in the grid


class MediaInput(Struct, frozen=True, kw_only=True):
    """What a model's encoder is given for one file, and the prompt tokens that its output stands for."""

    kind: MediaKind
    digest: bytes  # SHA-256 of the file and of how it was prepared: equal digests have equal encodings
    start: int  # position of its first token in the prompt
    positions: np.ndarray  # int32 [tokens]: offsets from `start` of the tokens that take an encoded row each
    values: np.ndarray  # float32: patches or mel features, in the shape that the encoder declares
    # frames, rows and columns of patches; of a sound the frames of its spectrogram, 1 and 1
    grid: tuple[int, int, int] = (1, 1, 1)
    # grids of its tokens where rotary positions know these (layers/rotary.py); (): its tokens have positions
    # as all others
    token_grids: tuple[TokenGrid, ...] = ()
    frame_step: float = 1.0  # positions from one frame of a grid to the next
    is_attended: bool = False  # no token stands for it: the prompt's tokens attend to it

    def num_tokens(self, end: int) -> int:
        """Prompt tokens before position `end` that take its rows."""
        return 0 if self.is_attended else int(np.searchsorted(self.positions, end - self.start))


class MediaValues(Struct, frozen=True, kw_only=True, array_like=True):
    """An encoder's input on its way to the ranks. `id` names its encoding there; none is used twice."""

    id: int
    values: np.ndarray  # float32: MediaInput.values, flat
    shape: tuple[int, ...]  # of MediaInput.values
    grid: tuple[int, int, int]
    num_rows: int  # that it is encoded to


class Encode(Struct, frozen=True, kw_only=True, array_like=True, tag="encode"):
    """Drop some encodings, then encode images, videos and sounds and keep the rows on the device. Steps that
    follow take rows of them (MediaRows). It has no answer: the scheduler knows what the ranks keep.

    An encoding may be made over several commands: `until` names it in each of them, and the first one brings
    its values."""

    dropped: list[int]  # also such that are not complete
    media: list[MediaValues]
    # by id: the part of the whole, up to 1, that is computed behind this command. At 1 it is complete; what
    # is not named here is made at once
    until: dict[int, float] = {}
    group: int = 0  # the attention group whose ranks keep the rows


class EncodeRows(Struct, frozen=True, kw_only=True, array_like=True, tag="encode_rows"):
    """Encode a file for another server. RowsEncoded answers it, from the rank that reports."""

    id: int
    media: MediaValues


class RowsEncoded(Struct, frozen=True, kw_only=True, array_like=True, tag="rows_encoded"):
    """The answer to EncodeRows, and to AlignSound: for each token behind the prompt a row of how well it
    goes with each position of the sound."""

    id: int
    rows: np.ndarray  # float32, flat; empty after an error
    num_rows: int = 0
    error: str = ""  # why there are none, as a sentence; empty: there are


class AlignSound(Struct, frozen=True, kw_only=True, array_like=True, tag="align_sound"):
    """Find which part of a sound each token of its transcription goes with. RowsEncoded answers it, from the
    rank that reports."""

    id: int
    media: MediaValues  # its id names the encoding that ranks may keep of it; where they do not, it is made
    token_ids: np.ndarray  # int32 [T]: what the decoder is given
    num_given: int  # tokens of these that are the prompt
    num_positions: int  # of the encoding that the sound has, without the silence behind it
    heads: list[tuple[int, int]]  # layer and head, of the heads that follow the sound
    filter_width: int  # positions of the median filter, odd


class MediaRows(Struct, frozen=True, array_like=True):
    """Rows of encodings that a step takes in place of embeddings of tokens: from each of `ids` the rows
    [begins, begins + counts)."""

    places: np.ndarray  # int32 [E]: tokens of the step, in the order of the rows
    ids: np.ndarray  # int32 [S]
    begins: np.ndarray  # int32 [S]
    counts: np.ndarray  # int32 [S], E in all

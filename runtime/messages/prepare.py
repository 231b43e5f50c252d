"""What the event loop and the process of transformers' processor say to each other
(text/transformers_process.py)."""

from msgspec import Struct

from runtime.media_kind import MediaKind

MAX_MESSAGE_BYTES = 64 << 10


class PrepareRequest(Struct, frozen=True, kw_only=True):
    """A decoded file, whose array comes as the descriptor of its memory."""

    kind: MediaKind
    shape: tuple[int, ...]  # as Media.values
    rate: float  # samples a second


class PrepareResult(Struct, frozen=True, kw_only=True):
    """The answer, with a descriptor of the packed arrays (packed_arrays.py), `input_ids` among them."""

    num_bytes: int = 0
    digest: bytes = b""  # of these
    behind: int = 0  # with `position_ids` [3, 1, tokens] among them: the position of what follows the file
    error: str = ""  # why there are none; empty: there are
    is_fault: bool = False  # the file is not to blame

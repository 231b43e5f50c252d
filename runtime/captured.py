"""What scheduler and ranks tell each other of graphs."""

from msgspec import Struct


class Capture(Struct, frozen=True, array_like=True, tag="capture"):
    """Capture decode steps of so many sequences, or what lies between attentions of steps of so many tokens (devices/pieces.py), between
    the steps before and behind; Captured answers it."""

    size: int
    unit: str = "sequences"  # or tokens


class Captured(Struct, frozen=True, array_like=True, tag="captured"):
    """What became of a Capture, on all ranks."""

    size: int
    seconds: float
    num_bytes: int  # of the device's memory that it took
    error: str  # why it failed; empty: it did not
    unit: str = "sequences"
    is_fatal: bool = False  # one rank failed where others wait for it: they end

"""What a measurement of a device says: written by ranks/benchmark.py, read by whoever started it.
Torch-free."""

from msgspec import Struct


class Figure(Struct, frozen=True):
    """One measurement. `unit`: GB/s of device memory, TFLOP/s, or us a call."""

    name: str
    value: float
    unit: str


class Measured(Struct, frozen=True, kw_only=True):
    """What rank 0 of a device found."""

    device: str
    dtype: str
    ranks: int
    torch: str
    figures: list[Figure]

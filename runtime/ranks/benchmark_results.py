"""Results of the benchmark of a device: ranks/benchmark.py prints them, cli/doctor/bench.py reads them.
Torch-free."""

from msgspec import Struct


class Figure(Struct, frozen=True):
    """One measurement. `unit`: GB/s of device memory, TFLOP/s, or us a call."""

    name: str
    value: float
    unit: str


class Measured(Struct, frozen=True, kw_only=True):
    """Results of rank 0."""

    device: str
    dtype: str
    ranks: int
    torch: str
    figures: list[Figure]

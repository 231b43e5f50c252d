"""Parts of one accelerator that compute at the same time (PD multiplexing). Torch-free at run time."""

from typing import NamedTuple, Protocol

from runtime.devices.streams import Stream


class Partition(NamedTuple):
    """Two streams whose work runs on different multiprocessors."""

    prompts: Stream
    decodes: Stream


class Partitions(Protocol):
    """The ways in which an accelerator is divided."""

    @property
    def least_rows(self) -> list[int]:
        """The fewest decode rows of a step for which each partition is taken."""
        ...

    def of(self, num_rows: int) -> Partition:
        """The partition for steps with so many decode rows, and with prompts."""
        ...

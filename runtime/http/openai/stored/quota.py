"""The quota of stored files: bytes are taken from it before they are written to disk."""

from types import TracebackType
from typing import Self

from runtime.errors import StorageFull


class Quota:
    """Bytes that may be stored, and how many are: in files, and in what is being written."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> None:
        """Takes `size` bytes. Raises StorageFull when they are not there."""
        if self.used + size > self.limit:
            remedy = "delete some" if size <= self.limit else "send smaller ones"
            raise StorageFull(
                f"{self.used} bytes are stored already, {size} more are needed, and this server stores "
                f"{self.limit} (--file-storage-bytes); {remedy}"
            )
        self.used += size

    def give(self, size: int) -> None:
        """Gives `size` bytes back."""
        self.used -= size


class Reservation:
    """Bytes of a quota for one file that is being written. Use as `with`: what is not kept goes back."""

    def __init__(self, quota: Quota) -> None:
        self.size = 0
        self._quota = quota

    def cover(self, size: int) -> None:
        """Takes what is missing to `size` bytes. Raises StorageFull."""
        if size > self.size:
            self._quota.take(size - self.size)
            self.size = size

    def settle(self, size: int) -> None:
        """There are exactly `size` bytes on the disk, whatever the quota: that many are taken."""
        self._quota.give(self.size - size)
        self.size = size

    def keep(self, size: int) -> None:
        """A file of `size` bytes of this reservation exists now: they stay taken, and are not of it any
        more."""
        self.size -= size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quota.give(self.size)
        self.size = 0

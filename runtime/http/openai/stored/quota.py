"""The quota of stored files: bytes are taken from it before they are written to disk; and the bounds on what
one tenant may keep of anything."""

from collections import Counter
from types import TracebackType
from typing import Self

from runtime.errors import StorageFull
from runtime.messages.tenants import tenant_of


class Quota:
    """Bytes that may be stored, and how many are: in files, and in what is being written."""

    def __init__(self, limit: int, tenant_quota: float = 1.0) -> None:
        """`tenant_quota`: as in Tenant.quota."""
        self.limit = limit
        self.tenant_quota = tenant_quota
        self.used = 0
        self.used_by = Counter[str]()  # by owner

    def take(self, size: int, owner: str) -> None:
        """Takes `size` bytes for an owner. Raises StorageFull when they are not there."""
        most = tenant_of(owner, self.tenant_quota).most(self.limit)
        if self.used_by[owner] + size > most < self.limit:
            raise StorageFull(
                f"you store {self.used_by[owner]} bytes, {size} more are needed, and one tenant may store "
                f"{most} (--tenant-quota of --file-storage-bytes); delete some"
            )
        if self.used + size > self.limit:
            remedy = "delete some" if size <= self.limit else "send smaller ones"
            raise StorageFull(
                f"{self.used} bytes are stored already, {size} more are needed, and this server stores "
                f"{self.limit} (--file-storage-bytes); {remedy}"
            )
        self.add(size, owner)

    def add(self, size: int, owner: str) -> None:
        """Counts `size` bytes that are stored, whatever the limit."""
        self.used += size
        self.used_by[owner] += size

    def give(self, size: int, owner: str) -> None:
        """Gives `size` bytes back."""
        self.add(-size, owner)
        if not self.used_by[owner]:
            del self.used_by[owner]


class Reservation:
    """Bytes of a quota for one file that is being written. Use as `with`: what is not kept goes back."""

    def __init__(self, quota: Quota, owner: str) -> None:
        self.size = 0
        self._quota = quota
        self._owner = owner

    def cover(self, size: int) -> None:
        """Takes what is missing to `size` bytes. Raises StorageFull."""
        if size > self.size:
            self._quota.take(size - self.size, self._owner)
            self.size = size

    def settle(self, size: int) -> None:
        """There are exactly `size` bytes on the disk, whatever the quota: that many are taken."""
        self._quota.give(self.size - size, self._owner)
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
        self._quota.give(self.size, self._owner)
        self.size = 0


class Kept:
    """Number and bytes of the objects of a kind that are kept, by owner, and the bounds of both: for all
    together, and for one tenant."""

    def __init__(self, max_count: int, max_bytes: int, tenant_quota: float = 1.0) -> None:
        """`tenant_quota`: as in Tenant.quota."""
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.tenant_quota = tenant_quota
        self.num_bytes = 0
        self.count = 0
        self._count_of = Counter[str]()
        self._bytes_of = Counter[str]()

    def add(self, owner: str, size: int, count: int = 1) -> None:
        """Counts objects that come; negative numbers: that go."""
        self.count += count
        self.num_bytes += size
        self._count_of[owner] += count
        self._bytes_of[owner] += size
        if not self._count_of[owner]:
            del self._count_of[owner], self._bytes_of[owner]

    def clear(self) -> None:
        """There are no objects."""
        self.num_bytes = self.count = 0
        self._count_of.clear()
        self._bytes_of.clear()

    def copy(self) -> "Kept":
        """A copy of this quota, with counts and bounds of its own."""
        other = Kept(self.max_count, self.max_bytes, self.tenant_quota)
        for owner, count in self._count_of.items():
            other.add(owner, self._bytes_of[owner], count)
        return other

    def takes(self, owner: str, size: int) -> bool:
        """Whether one object of this size may be kept for an owner at all."""
        return size <= tenant_of(owner, self.tenant_quota).most(self.max_bytes)

    def is_over(self, owner: str) -> bool:
        """Whether more is kept of this owner than a tenant may have: some of it has to go."""
        tenant = tenant_of(owner, self.tenant_quota)
        return self._count_of[owner] > tenant.most(self.max_count) or self._bytes_of[owner] > tenant.most(
            self.max_bytes
        )

    @property
    def is_full(self) -> bool:
        """Whether more is kept than may be."""
        return self.count > self.max_count or self.num_bytes > self.max_bytes

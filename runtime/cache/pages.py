"""Which pages of the KV cache are free."""

from collections.abc import Collection


class PagePool:
    """Hands out page ids 1 .. size-1, without the `broken`; page 0 is the ranks' padding page.

    Every page is either free here or owned by exactly one sequence or prefix node: its owner gets it from
    `allocate` and gives it back to `release`.
    """

    def __init__(self, size: int, broken: Collection[int] = ()) -> None:
        self.size = size
        self.broken = frozenset(broken)
        # a stack: pages used last are warm
        self._free = [page for page in range(size - 1, 0, -1) if page not in self.broken]
        self.num_pages = len(self._free)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that have an owner."""
        return self.num_pages - len(self._free)

    @property
    def free(self) -> Collection[int]:
        """Ids of the free pages."""
        return self._free

    def allocate(self, count: int) -> list[int]:
        """`count` pages; the caller has checked `num_free`."""
        assert count <= len(self._free), "allocate() without checking num_free"
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        pages.reverse()
        return pages

    def release(self, pages: list[int]) -> None:
        """Takes pages back from their owner."""
        self._free.extend(pages)
        assert len(self._free) <= self.num_pages, "a page was released twice"

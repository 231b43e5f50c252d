"""Which pages of the KV cache are free."""


class PagePool:
    """Hands out page ids 1 .. num_pages-1; page 0 is the ranks' padding page.

    Every page is either free here or owned by exactly one sequence or prefix node: `allocate` and `release` are the only doors.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: pages used last are warm

    @property
    def num_free(self) -> int:
        return len(self._free)

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
        self._free.extend(pages)
        assert len(self._free) <= self.num_pages, "a page was released twice"

"""Host memory of one rank: pages of keys and values that were copied from the device. Torch-free.

The bytes are in a memfd that the event-loop process makes for each rank and keeps (actors/supervisor.py). So
they survive the rank, and both processes map them: the rank copies pages between host memory and its device,
and the event-loop process reads and writes them for storage.

A host page has the same parts in every layout: for each layer the keys of its tokens, then their values.
Layouts say where a part is:

    layer_first           part by part, and page by page within   the pages of a layer are contiguous
    page_first            page by page, and part by part within   a page is contiguous, as files want it
    page_first_kv_split   as page_first, for all keys, then for   the keys of a page are contiguous, and so
                          all values                              are its values
"""

import mmap
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from runtime.errors import StartError
from runtime.messages.ranks import StartRank

Groups = Callable[[range], list[range]]
# groups of parts: memory is ordered by group, then by page, then by part
LAYOUTS: dict[str, Groups] = {
    "layer_first": lambda parts: [range(part, part + 1) for part in parts],
    "page_first": lambda parts: [parts],
    "page_first_kv_split": lambda parts: [parts[0::2], parts[1::2]],
}
MOST = 0.9  # fraction of the free memory that host pages may take


class Region(NamedTuple):
    """Where a part, or several contiguous ones, are in each page: their group begins at byte `begin`, and
    each page of the group has `stride` bytes."""

    begin: int
    stride: int
    offset: int  # within a page
    size: int


class PageGeometry:
    """Where pages and their parts lie in host memory."""

    def __init__(self, num_pages: int, part_bytes: tuple[int, ...], layout: str) -> None:
        """`part_bytes`: bytes of each part of a page; `layout`: a row of LAYOUTS."""
        self.num_pages = num_pages
        self.part_bytes = part_bytes
        self.page_bytes = sum(part_bytes)
        self.layout = layout
        self.regions = self._locate(LAYOUTS[layout](range(len(part_bytes))))
        self._chunks: dict[range, list[Region]] = {}  # contiguous ones of these parts joined

    def _locate(self, groups: list[range]) -> dict[int, Region]:
        regions, begin = {}, 0
        for group in groups:
            sizes = [self.part_bytes[part] for part in group]
            regions |= {
                part: Region(begin, sum(sizes), sum(sizes[:at]), sizes[at]) for at, part in enumerate(group)
            }
            begin += self.num_pages * sum(sizes)
        return regions

    def spans(self, page: int, parts: range | None = None) -> list[tuple[int, int]]:
        """Offsets and sizes of the bytes of a page, or of some parts of it, as few as the layout allows, in
        the order of its parts."""
        assert 0 <= page < self.num_pages, page
        own = range(len(self.part_bytes)) if parts is None else parts
        if own not in self._chunks:
            self._chunks[own] = self._join(own)
        return [(begin + page * stride + offset, size) for begin, stride, offset, size in self._chunks[own]]

    def _join(self, parts: range) -> list[Region]:
        chunks: list[Region] = []
        for index in map(self.regions.__getitem__, parts):
            last = chunks[-1] if chunks else None
            if last is not None and last.begin == index.begin and last.offset + last.size == index.offset:
                chunks[-1] = last._replace(size=last.size + index.size)
            else:
                chunks.append(index)
        return chunks


class HostPages:
    """A mapping of one rank's host memory. It is unmapped when there are no references to it or to its
    views."""

    def __init__(self, fd: int, num_pages: int, part_bytes: tuple[int, ...], layout: str) -> None:
        """`part_bytes`: bytes of each part of a page. The memory behind `fd` has its full size; `fd` may be
        closed afterwards."""
        assert layout in LAYOUTS, layout
        self.num_pages = num_pages
        self.part_bytes = part_bytes
        self.geometry = PageGeometry(num_pages, part_bytes, layout)
        self.page_bytes = self.geometry.page_bytes
        self._memory = mmap.mmap(fd, num_pages * self.page_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, np.uint8)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return int(self._bytes.ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Size of the mapping."""
        return len(self._bytes)

    def part(self, index: int) -> np.ndarray:
        """One part of all pages: uint8 [num_pages, part_bytes[index]], rows contiguous, shared with the
        memory."""
        begin, stride, offset, size = self.geometry.regions[index]
        group = self._bytes[begin : begin + self.num_pages * stride].reshape(self.num_pages, stride)
        return group[:, offset : offset + size]

    def view(self, offset: int, size: int) -> memoryview:
        """Bytes of the memory."""
        return memoryview(self._memory)[offset : offset + size]

    def views(self, page: int) -> list[memoryview]:
        """The bytes of a page in as few contiguous views as the layout allows; joined they are the parts in
        order."""
        return [self.view(*span) for span in self.geometry.spans(page)]


def open_host(
    start: StartRank, rank: int, num_device_pages: int, part_bytes: tuple[int, ...], free_bytes: int
) -> HostPages | None:
    """Sizes and maps this rank's host memory; None without a host tier. `free_bytes`: memory of the machine
    that this rank may take.

    Memory that an earlier generation of ranks has sized keeps its size and content. A size in bytes
    (--hicache-size) must fit; a ratio is limited to what is free. Raises StartError if a size does not fit,
    or if fewer than two pages do.
    """
    if not start.host_bytes and not start.host_ratio:
        return None
    fd, page_bytes = start.host_fds[rank], sum(part_bytes)
    size = os.fstat(fd).st_size
    if size and size % page_bytes == 0:
        return HostPages(fd, size // page_bytes, part_bytes, start.host_layout)
    num_pages = count_host_pages(start, num_device_pages, page_bytes, free_bytes)
    os.ftruncate(fd, 0)  # pages of another size are of no use
    os.ftruncate(fd, num_pages * page_bytes)
    return HostPages(fd, num_pages, part_bytes, start.host_layout)


def count_host_pages(start: StartRank, num_device_pages: int, page_bytes: int, free_bytes: int) -> int:
    """Pages for `open_host`. Raises StartError."""
    fitting = int(free_bytes * MOST) // page_bytes
    if start.host_bytes:
        wanted = start.host_bytes // page_bytes
        if wanted > fitting:
            raise StartError(
                f"--hicache-size asks for {start.host_bytes / 1e9:.2f} GB of host pages for each rank, and "
                f"{free_bytes / 1e9:.2f} GB are free, of which at most {MOST:.0%} may be taken; lower it, "
                "or leave it at 0 and set --hicache-ratio"
            )
    else:
        wanted = int(start.host_ratio * num_device_pages)
    num_pages = min(wanted, fitting)
    if num_pages < 2:
        raise StartError(
            f"there is room for {num_pages} host pages of {page_bytes} bytes ({free_bytes} bytes are "
            "free for this "
            "rank); raise --hicache-size or --hicache-ratio, lower --mem-fraction-static, or take a "
            "smaller --page-size"
        )
    return num_pages

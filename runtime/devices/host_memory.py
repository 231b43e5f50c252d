"""Host memory of one rank: pages of keys and values that have left the device, or will.

The bytes live in a memfd that the event-loop process makes for each rank and keeps (actors/supervisor.py). So
they outlive a rank that is killed, and both sides map them: the rank copies pages between here and its
device, and whoever sits on the event loop can read and write them.

A host page has the same parts on every layout: for each layer the keys of its tokens, then their values.
Layouts say where a part stands:

    layer_first           part by part, in it page by page       a layer of many pages is one piece of memory
    page_first            page by page, in it part by part       a page is one piece of memory: what reads and writes files wants
    page_first_kv_split   the same for all keys, then for all    the keys of a page are one piece of memory, and so are its values
                          values

Imports no torch: it is read on both sides.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runtime.errors import StartError
from runtime.messages.ranks import StartRank

Groups = Callable[[range], list[range]]
# which parts stand together: group by group, in it page by page, in it part by part
LAYOUTS: dict[str, Groups] = {
    "layer_first": lambda parts: [range(part, part + 1) for part in parts],
    "page_first": lambda parts: [parts],
    "page_first_kv_split": lambda parts: [parts[0::2], parts[1::2]],
}
MOST = 0.9  # of the memory that is free: the rest of the machine wants to live, too


class Place(NamedTuple):
    """Where a part, or a piece of several, stands: its group begins at `begin`, in which each page takes
    `stride` bytes."""

    begin: int
    stride: int
    offset: int  # within a page
    size: int


class HostPages:
    """A mapping of one rank's host memory. It is unmapped when neither it nor any view of it is referred
    to."""

    def __init__(self, fd: int, num_pages: int, part_bytes: tuple[int, ...], layout: str) -> None:
        """`part_bytes`: bytes of each part of a page. The memory behind `fd` has its size already; `fd` may
        be closed afterwards."""
        assert layout in LAYOUTS, layout
        self.num_pages = num_pages
        self.part_bytes = part_bytes
        self.page_bytes = sum(part_bytes)
        self._memory = mmap.mmap(fd, num_pages * self.page_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._places = self._place(LAYOUTS[layout](range(len(part_bytes))))
        self._pieces: list[Place] = []  # neighbours joined
        for index in map(self._places.__getitem__, range(len(part_bytes))):
            last = self._pieces[-1] if self._pieces else None
            if last is not None and last.begin == index.begin and last.offset + last.size == index.offset:
                self._pieces[-1] = last._replace(size=last.size + index.size)
            else:
                self._pieces.append(index)

    def _place(self, groups: list[range]) -> dict[int, "Place"]:
        places, begin = {}, 0
        for group in groups:
            sizes = [self.part_bytes[part] for part in group]
            places |= {
                part: Place(begin, sum(sizes), sum(sizes[:at]), sizes[at]) for at, part in enumerate(group)
            }
            begin += self.num_pages * sum(sizes)
        return places

    @property
    def address(self) -> int:
        """Of the first byte."""
        return int(self._bytes.ctypes.data)

    @property
    def num_bytes(self) -> int:
        return len(self._bytes)

    def part(self, index: int) -> np.ndarray:
        """One part of all pages: uint8 [num_pages, part_bytes[index]], rows contiguous, shared with the
        memory."""
        begin, stride, offset, size = self._places[index]
        group = self._bytes[begin : begin + self.num_pages * stride].reshape(self.num_pages, stride)
        return group[:, offset : offset + size]

    def views(self, page: int) -> list[memoryview]:
        """The bytes of a page in as few contiguous pieces as the layout allows; joined they are the parts in
        order."""
        assert 0 <= page < self.num_pages, page
        whole = memoryview(self._memory)
        begins = [(begin + page * stride + offset, size) for begin, stride, offset, size in self._pieces]
        return [whole[begin : begin + size] for begin, size in begins]


def open_host(
    start: StartRank, rank: int, num_device_pages: int, part_bytes: tuple[int, ...], free_bytes: int
) -> HostPages | None:
    """Gives this rank's host memory its size and maps it; None where no host tier is wanted. `free_bytes`:
    that this rank may take of it.

    Memory that an earlier generation of ranks has sized keeps its size and content. A size in bytes is a
    demand, and a ratio a wish that is cut to what is free. Raises StartError when a demand is beyond that, or
    when less than two pages would remain.
    """
    if not start.host_bytes and not start.host_ratio:
        return None
    fd, page_bytes = start.host_fds[rank], sum(part_bytes)
    found = os.fstat(fd).st_size
    if found and found % page_bytes == 0:
        return HostPages(fd, found // page_bytes, part_bytes, start.host_layout)
    num_pages = count_host_pages(start, num_device_pages, page_bytes, free_bytes)
    os.ftruncate(fd, 0)  # content of another size means nothing
    os.ftruncate(fd, num_pages * page_bytes)
    return HostPages(fd, num_pages, part_bytes, start.host_layout)


def count_host_pages(start: StartRank, num_device_pages: int, page_bytes: int, free_bytes: int) -> int:
    """See `open_host`."""
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
            f"there is room for {num_pages} host pages of {page_bytes} bytes ({free_bytes} bytes are free for this "
            "rank); raise --hicache-size or --hicache-ratio, lower --mem-fraction-static, or take a smaller --page-size"
        )
    return num_pages


def _read(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def available_bytes(root: Path = Path("/")) -> int:
    """MemAvailable, or what the cgroup (v2, then v1) leaves of its limit when that is less."""
    meminfo = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    group = root / "sys/fs/cgroup"
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read(group / limit_name), _read(group / usage_name)
        if limit.isdigit() and usage.isdigit():
            return min(available, max(0, int(limit) - int(usage)))
    return available

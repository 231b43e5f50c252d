"""Pages of one layout written to the host memory of another: as many tokens in a page, other numbers of ranks
and stages.

    on the way, a part of two ranks        full rows                   host memory of four ranks
    [token][first half of the heads]       [token][all heads]          [token][a quarter of them]
    [token][second half]

Heads lie in the order of ranks, so no part needs to know how many there are.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, product

import numpy as np

from runtime.devices.host_memory import HostPages
from runtime.messages.transfer import Memory, PageLayout, RankMemory, Section


class RankPages:
    """Host memory of the ranks of a server, in the order of ranks: stage by stage, and in it rank by rank."""

    def __init__(
        self,
        ranks: Sequence[HostPages],
        states: Sequence[HostPages],
        page_size: int,
        num_stages: int,
        *,
        num_heads: int,
        fds: Sequence[int] = (),
        state_fds: Sequence[int] = (),
    ) -> None:
        """`states`: of recurrent layers, empty without any; `num_heads`: of keys and values, which
        the ranks of a stage share; where they are fewer, neighbours have the same one. `fds` and
        `state_fds`: descriptors of the memory, which their owner keeps open."""
        self._states = states
        self._width = len(ranks) // num_stages
        self._stages = [ranks[at : at + self._width] for at in range(0, len(ranks), self._width)]
        self._copies = max(1, self._width // num_heads)  # ranks that have the same heads
        self._senders = [rank for stage in self._stages for rank in stage[:: self._copies]]
        stages = [fds[at : at + self._width] for at in range(0, len(fds), self._width)]
        # of the memories that `memory` names, in their order
        self.fds = [fd for stage in stages for fd in stage[:: self._copies]] + list(state_fds)
        self.layout = PageLayout(
            page_size,
            self._width // self._copies,
            tuple(stage[0].part_bytes for stage in self._stages),
            tuple(state.page_bytes for state in states),
        )

    @property
    def needs_copies(self) -> bool:
        """Whether some ranks have the same heads, which travel once."""
        return self._copies > 1

    @property
    def memories(self) -> list[HostPages]:
        """All that can be read and written by other servers."""
        return [*(rank for stage in self._stages for rank in stage), *self._states]

    @property
    def num_parts(self) -> list[int]:
        """Parts of a page on a rank of each stage."""
        return [len(stage) for stage in self.layout.parts]

    def num_stored(self, by_rank: Mapping[int, int]) -> list[int]:
        """For each stage, the parts that all of its ranks have; `by_rank`: how many each has, 0 where it is
        missing."""
        return [
            min(by_rank.get(stage * self._width + place, 0) for place in range(0, self._width, self._copies))
            for stage in range(len(self._stages))
        ]

    def memory(self, name: bytes) -> Memory:
        """Where another server finds pages and states; `name`: of this one."""
        return Memory(name, tuple(map(_rank_memory, self._senders)), tuple(map(_rank_memory, self._states)))

    def views(self, hosts: Iterable[int], section: Section | None = None) -> list[memoryview]:
        """The bytes of pages, or of a section of them, as they travel: page by page, in as few views as the
        memory allows."""
        senders, parts = self._senders, None
        if section is not None:
            first = section.stage * self.layout.num_ranks
            senders = senders[first : first + self.layout.num_ranks]
            parts = range(section.first, section.end)
        spans: list[tuple[HostPages, int, int]] = []
        for host, rank in product(hosts, senders):
            for offset, size in rank.geometry.spans(host, parts):
                last, begin, length = spans[-1] if spans else (None, 0, 0)
                if last is rank and begin + length == offset:
                    spans[-1] = rank, begin, length + size
                else:
                    spans.append((rank, offset, size))
        return [rank.view(offset, size) for rank, offset, size in spans]

    def state(self, place: int) -> list[memoryview]:
        """The bytes of a state."""
        return [view for rank in self._states for view in rank.views(place)]

    def copy(self, hosts: Iterable[int]) -> None:
        """Gives every rank what the first one with its heads has of these pages."""
        for host, stage in product(hosts, self._stages):
            for place, rank in enumerate(stage):
                first = stage[place - place % self._copies]
                if rank is not first:
                    for target, source in zip(rank.views(host), first.views(host), strict=True):
                        target[:] = source

    def write(self, host: int, page: memoryview, layout: PageLayout) -> None:
        """Writes a page that came in another layout, for which `mismatch` is None."""
        parts = iter([np.frombuffer(part, np.uint8) for part in split(page, layout)])
        rows: list[np.ndarray] = []  # of each part of all stages: [tokens, bytes of all heads]
        for stage in layout.parts:
            ranks = [[next(parts) for _ in stage] for _ in range(layout.num_ranks)]
            tokens = layout.page_size
            for part in zip(*ranks, strict=True):
                rows.append(np.concatenate([piece.reshape(tokens, -1) for piece in part], axis=1))
        for own in self._stages:
            for index, size in enumerate(own[0].part_bytes):
                row, width = rows.pop(0), size // layout.page_size
                for place, rank in enumerate(own):
                    begin = place // self._copies * width
                    rank.part(index)[host] = row[:, begin : begin + width].reshape(-1)


def _rank_memory(rank: HostPages) -> RankMemory:
    return RankMemory(rank.num_pages, rank.part_bytes, rank.geometry.layout, rank.address)


def split(page: memoryview, layout: PageLayout) -> list[memoryview]:
    """A page that came in one piece, as its parts."""
    sizes = [size for stage in layout.parts for _ in range(layout.num_ranks) for size in stage]
    ends = list(accumulate(sizes))
    return [page[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def section_of(pages: memoryview, layout: PageLayout, section: Section) -> list[memoryview]:
    """The bytes of a section of pages that lie one behind the other as they travel, page by page."""
    stage = layout.parts[section.stage]
    begin = layout.num_ranks * sum(map(sum, layout.parts[: section.stage])) + sum(stage[: section.first])
    size = sum(stage[section.first : section.end])
    starts = [
        page + begin + rank * sum(stage)
        for page in range(0, len(pages), layout.page_bytes)
        for rank in range(layout.num_ranks)
    ]
    return [pages[at : at + size] for at in starts]


def mismatch(theirs: PageLayout, own: PageLayout) -> str | None:
    """Why pages of one layout cannot become pages of the other; None: they can."""
    if theirs.page_size != own.page_size:
        return f"its pages have {theirs.page_size} tokens, ours {own.page_size} (--page-size)"
    if theirs.state_bytes != own.state_bytes:
        return "its states of recurrent layers are divided otherwise (give both the same --tp and --pp)"
    if _sizes(theirs) != _sizes(own):
        return "its keys and values have other sizes: heads that do not divide by the ranks, or another dtype"
    return None


def _sizes(layout: PageLayout) -> list[int]:
    return [size * layout.num_ranks for stage in layout.parts for size in stage]

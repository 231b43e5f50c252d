"""Pages of one layout written to the host memory of another: as many tokens in a page, other numbers of ranks
and stages.

    on the way, a part of two ranks        full rows                   host memory of four ranks
    [token][first half of the heads]       [token][all heads]          [token][a quarter of them]
    [token][second half]

Heads lie in the order of ranks, so no part needs to know how many there are.
"""

from collections.abc import Sequence

import numpy as np

from runtime.devices.host_memory import HostPages
from runtime.messages.transfer import PageLayout


class RankPages:
    """Host memory of the ranks of a server, in the order of ranks: stage by stage, and in it rank by rank."""

    def __init__(self, ranks: Sequence[HostPages], page_size: int, num_stages: int, *, is_replicated: bool):
        """`is_replicated`: every rank of a stage has all of each page (latent attention)."""
        self._width = len(ranks) // num_stages
        self._stages = [ranks[at : at + self._width] for at in range(0, len(ranks), self._width)]
        self._senders = [rank for stage in self._stages for rank in (stage[:1] if is_replicated else stage)]
        self.layout = PageLayout(
            page_size,
            1 if is_replicated else self._width,
            tuple(stage[0].part_bytes for stage in self._stages),
            is_replicated,
        )

    @property
    def needs_copies(self) -> bool:
        """Whether ranks have what does not travel: copies of what the first rank has."""
        return self.layout.is_replicated and self._width > 1

    def views(self, host: int) -> list[memoryview]:
        """The bytes of a page as they travel."""
        return [view for rank in self._senders for view in rank.views(host)]

    def copy(self, host: int) -> None:
        """Gives every rank what its stage's first one has."""
        for first, *others in self._stages:
            for rank in others:
                for target, source in zip(rank.views(host), first.views(host), strict=True):
                    target[:] = source

    def write(self, host: int, page: memoryview, layout: PageLayout) -> None:
        """Writes a page that came in another layout, for which `mismatch` is None."""
        pieces = [rank for stage in layout.parts for rank in [stage] * layout.num_ranks]
        ends = np.cumsum([size for rank in pieces for size in rank])
        parts = iter(np.split(np.frombuffer(page, np.uint8), ends[:-1]))
        rows: list[np.ndarray] = []  # of each part of all stages: [tokens, bytes of all heads]
        for stage in layout.parts:
            ranks = [[next(parts) for _ in stage] for _ in range(layout.num_ranks)]
            tokens = layout.page_size
            for part in zip(*ranks, strict=True):
                rows.append(np.concatenate([piece.reshape(tokens, -1) for piece in part], axis=1))
        for stage in self._stages:
            for index, size in enumerate(stage[0].part_bytes):
                row, width = rows.pop(0), size // layout.page_size
                for place, rank in enumerate(stage):
                    begin = 0 if self.layout.is_replicated else place * width
                    rank.part(index)[host] = row[:, begin : begin + width].reshape(-1)


def mismatch(theirs: PageLayout, own: PageLayout) -> str | None:
    """Why pages of one layout cannot become pages of the other; None: they can."""
    if theirs.page_size != own.page_size:
        return f"its pages have {theirs.page_size} tokens, ours {own.page_size} (--page-size)"
    if theirs.is_replicated != own.is_replicated:
        return "one of both has attention whose ranks share nothing"
    if _sizes(theirs) != _sizes(own):
        return "its keys and values have other sizes: heads that do not divide by the ranks, or another dtype"
    return None


def _sizes(layout: PageLayout) -> list[int]:
    return [size * layout.num_ranks for stage in layout.parts for size in stage]

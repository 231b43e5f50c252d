"""The rows of a step as attention sees them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from runtime.layers.upload import Packed


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """`R` rows of queries, the first `num_decodes` of them with one query each.

    A row's queries stand at positions `starts[r]`, `starts[r] + 1`, ... and attend to everything before them
    in their slot, and to themselves. With `parents` they may form trees instead of chains. With `strides`
    positions between them may have queries elsewhere (context parallelism).
    """

    num_decodes: int
    slots: np.ndarray  # int32 [R]
    starts: np.ndarray  # int64 [R]: tokens of the slot before the row
    counts: np.ndarray  # int32 [R]: queries of the row
    # of rows that are trees, by row: which of the row's queries each one follows, -1 for the first; a query
    # sees what is before the row, and the row's queries on its way from the first
    parents: dict[int, np.ndarray] | None = None
    # int32 [R]: distance between the positions of a row's queries; None: 1. For devices with
    # DeviceFacts.gathers_rows alone
    strides: np.ndarray | None = None
    # of rows with tokens that see each other both ways, as those of an image in Gemma 3, by row: int64
    # [spans, 2], the first query and that behind the last one of each span. Kernels are causal: these rows
    # are for layers/attention/sdpa.py (layers/attention/spans.py)
    spans: dict[int, np.ndarray] | None = None
    # tokens of a block, which stand at multiples of it: each query attends to all up to the end of its
    # block, and rows are whole blocks; 0: up to itself. Kernels that do not know blocks take `by_query`
    block_size: int = 0
    # of `stacked`, on its way to the device with the other arrays of the step; None: it travels alone
    packed: "Packed | None" = None

    def by_query(self) -> "AttentionRows":
        """Rows of blocks for kernels that do not know blocks: each query is a row that decodes, as if it
        stood at the end of its block."""
        counts = self.counts.astype(np.int64)
        firsts = counts.cumsum() - counts
        positions = np.repeat(self.starts - firsts, counts) + np.arange(counts.sum())
        ends = (positions // self.block_size + 1) * self.block_size
        slots = np.repeat(self.slots, counts)
        return AttentionRows(len(slots), slots, ends - 1, np.ones(len(slots), np.int32))

    def stacked(self) -> np.ndarray:
        """int32 [4, R]: slots, starts, counts, and the first query of each row."""
        counts = self.counts.astype(np.int32)
        return np.stack(
            (
                self.slots.astype(np.int32),
                self.starts.astype(np.int32),
                counts,
                np.cumsum(counts, dtype=np.int32) - counts,
            )
        )

    @property
    def ends(self) -> np.ndarray:
        """int64 [R]: tokens of the slot that the last query of a row sees."""
        strides = 1 if self.strides is None else self.strides
        ends: np.ndarray = self.starts + (self.counts - 1) * strides + 1
        return ends

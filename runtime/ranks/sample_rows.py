"""Where a step samples: one row of logits for each token after which something is sampled."""

from dataclasses import dataclass

import numpy as np

from runtime.layers.sampling.verify import DraftRows
from runtime.layers.upload import Packed
from runtime.messages.steps import Samples, StepPlan

ALL, BLOCK = int(Samples.ALL), int(Samples.BLOCK)  # numpy compares plain numbers several times faster
NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Arrays of a step's rows that travel to the device with the others of the step."""

    places: Packed  # int64 [N], as SampleRows.places
    slots: Packed  # int64 [N], as SampleRows.slots
    numbers: Packed | None  # float64 [N], by which tokens are sampled; None: all rows are greedy
    ends: Packed | None  # of SlotLengths.pack_ends


@dataclass(frozen=True, slots=True)
class SampleRows:
    """`S` rows of the plan that sample, after `N` of the step's tokens."""

    rows: np.ndarray  # int64 [S]: of the plan
    places: np.ndarray  # int64 [N]: of the step's tokens
    slots: np.ndarray  # int32 [N]
    lengths: np.ndarray  # int64 [N]: tokens of the sequence up to there, so the position of what is sampled
    # of the rows that sample after ALL of their tokens; None: there are none, N = S
    drafts: DraftRows | None
    # int64 [V]: which of the S rows these are; empty without drafts
    verified: np.ndarray
    packed: PackedRows | None = None  # None: each array travels alone

    def contexts(self, wanted: set[int]) -> dict[int, list[int]]:
        """By row of logits, the drafts before it on its path; of the slots `wanted`, where there are any."""
        if self.drafts is None:
            return {}
        return {
            int(first) + node: self.drafts.path(row, node)
            for row, (first, count) in enumerate(zip(self.drafts.first, self.drafts.counts, strict=True))
            if int(self.slots[first]) in wanted
            for node in range(1, int(count))
        }

    def accepted(self, num: np.ndarray, path: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """What DraftRows accept. -> int64: rows of logits whose tokens the step brings, in order, and how
        many of them each of the S rows has"""
        assert self.drafts is not None
        counts = np.ones(len(self.rows), np.int64)
        counts[self.verified] = num
        nodes = [[0]] * len(self.rows)
        for row, place in enumerate(self.verified.tolist()):
            taken = int(num[row])
            nodes[place] = list(range(taken)) if path is None else path[row, :taken].tolist()
        first = self.first_rows()
        return np.array([first[row] + node for row, own in enumerate(nodes) for node in own]), counts

    def first_rows(self) -> np.ndarray:
        """int64 [S]: of each row that samples, its first row of logits."""
        widths = np.ones(len(self.rows), np.int64)
        if self.drafts is not None:
            widths[self.verified] = self.drafts.counts
        return widths.cumsum() - widths


def sample_rows(plan: StepPlan, starts: np.ndarray) -> SampleRows:
    """`starts`, int64 [R]: the length of each row's slot before the step."""
    if plan.num_decodes == len(plan.slots):
        rows = np.arange(len(plan.slots))
        return SampleRows(rows, rows, plan.slots, starts + 1, None, NO_ROWS)
    rows = np.flatnonzero(plan.samples)
    ends = plan.counts.cumsum(dtype=np.int64)
    if plan.blocks is not None:
        return block_rows(plan, starts, rows, ends, plan.blocks.size)
    is_all = plan.samples[rows] == ALL
    if not is_all.any():
        lengths = starts[rows] + plan.counts[rows]
        return SampleRows(rows, ends[rows] - 1, plan.slots[rows], lengths, None, NO_ROWS)
    counts = plan.counts.astype(np.int64)
    widths = np.where(is_all, counts[rows], 1)
    first = widths.cumsum() - widths
    offsets = np.arange(widths.sum()) - np.repeat(first, widths)
    begins = np.where(is_all, ends[rows] - counts[rows], ends[rows] - 1)
    verified = np.flatnonzero(is_all)
    drafts = draft_rows(plan, rows[verified], first[verified])
    lengths = np.repeat(np.where(is_all, starts[rows] + 1, starts[rows] + counts[rows]), widths)
    for row, depths in enumerate(drafts.depths()):
        count = drafts.counts[row]
        lengths[drafts.first[row] : drafts.first[row] + count] += depths[:count]
    return SampleRows(
        rows,
        np.repeat(begins, widths) + offsets,
        np.repeat(plan.slots[rows], widths),
        lengths,
        drafts,
        verified,
    )


def block_rows(
    plan: StepPlan, starts: np.ndarray, rows: np.ndarray, ends: np.ndarray, size: int
) -> SampleRows:
    """The places of the blocks at the ends of rows, where what is sampled stands itself. `rows`, int64 [S]:
    of the plan; `ends`, int64 [R]: the step's token behind each row."""
    assert (plan.samples[rows] == BLOCK).all(), "rows of a diffusion model sample blocks"
    offsets = np.tile(np.arange(size), len(rows))
    first = np.repeat(ends[rows] - size, size)
    positions = np.repeat(starts[rows] + plan.counts[rows] - size, size) + offsets
    return SampleRows(rows, first + offsets, np.repeat(plan.slots[rows], size), positions, None, NO_ROWS)


def draft_rows(plan: StepPlan, rows: np.ndarray, first: np.ndarray) -> DraftRows:
    """The verify rows `rows` of the plan, whose first rows of logits are `first`."""
    counts = plan.counts[rows].astype(np.int64)
    tokens = np.full((len(rows), counts.max()), -1, np.int64)
    parents = tokens.copy()
    num_drafts = np.where(np.arange(len(plan.counts)) < plan.num_decodes, 0, plan.counts - 1)
    ends = num_drafts.cumsum()
    is_chain = True
    for at, row in enumerate(rows.tolist()):
        own = slice(ends[row] - num_drafts[row], ends[row])
        tokens[at, 1 : counts[at]] = plan.token_ids[own]
        chain = np.arange(counts[at] - 1)
        given = chain if plan.draft_parents is None else plan.draft_parents[own]
        parents[at, 1 : counts[at]] = given
        is_chain = is_chain and bool((given == chain).all())
    return DraftRows(first, counts, tokens, parents, is_chain)


def tree_parents(plan: StepPlan) -> dict[int, np.ndarray]:
    """Rows of the plan whose drafts are a tree: which of the row's tokens each one follows, -1 for the
    first."""
    trees: dict[int, np.ndarray] = {}
    if plan.draft_parents is None:
        return trees
    at = 0
    for row in range(plan.num_decodes, plan.num_decodes + plan.num_verifies):
        count = int(plan.counts[row]) - 1
        parents = plan.draft_parents[at : at + count]
        at += count
        if (parents != np.arange(count)).any():
            trees[row] = np.concatenate(([-1], parents))
    return trees

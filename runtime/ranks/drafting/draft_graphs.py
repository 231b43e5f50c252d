"""Passes of a draft model as graphs, for the rows of a verify step that is a graph itself.

    first    entries of all tokens that are pending in each row, up to the slot's last one; the first draft
    next     one entry a row, of the draft before it; the next draft. Replayed once for each further draft
    keep     behind the target's sampling, in its graph: what was accepted is pending again

All they read is on the device: lengths of slots, pending tokens and states, and up to where entries are made.
So drafts are made without knowing how many of the last step's were accepted, unless the device's attention
takes lengths from the host. Each of them computes every row of its size. What a row has too much is padding:
tokens that are not pending, and passes behind the row's last draft.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import ForwardBatch
from runtime.devices.decoder_spec import Forwarded
from runtime.devices.step_graphs import Graph
from runtime.ranks.captured_forward import CapturedForward, locations
from runtime.ranks.drafting.draft_runner import DraftRunner
from runtime.ranks.drafting.network import Computed
from runtime.ranks.transfers import Transfers

Filters = tuple[int, bool] | None  # of CapturedForward.sampled


@dataclass(frozen=True, slots=True)
class RecordedDrafts:
    """The graphs captured for one number of rows whose drafts are sampled in one way."""

    first: Graph
    next: Graph


class DraftGraphs:
    """Graphs of the draft model of a rank, and the static tensors that they read and write."""

    def __init__(
        self, drafts: DraftRunner, target: CapturedForward, transfers: Transfers, largest: int, depth: int
    ) -> None:
        """`largest`: number of rows; `depth`: drafts of a row, at most."""
        self.drafts = drafts
        self.target = target
        self.transfers = transfers
        self.pending = drafts.pending
        self.reach = drafts.pending.reserve()
        self.recorded: dict[tuple[int, Filters], RecordedDrafts] = {}
        device = target.device.torch_device
        self.packed = torch.zeros(2 * largest, dtype=torch.int32, device=device)
        # the drafts; a second column is captured in any case
        self.tokens = torch.zeros(largest, max(depth, 2), dtype=torch.int64, device=device)
        self.last = torch.zeros(largest, dtype=torch.int64, device=device)  # latest draft of each row
        width = drafts.network.width
        self.states = torch.zeros(largest, width, dtype=self.pending.states.dtype, device=device)  # its state
        self.depth = torch.zeros(1, dtype=torch.int64, device=device)  # drafts of each row so far

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────

    def propose(self, size: int, filters: Filters, slots: np.ndarray, counts: np.ndarray) -> Tensor:
        """Drafts of these slots, int64 [R, depth or more], `counts` of them in each row and any numbers
        behind these; the next step overwrites them. A row may want none: its pending entries are made all the
        same."""
        rows = np.full((2, size), self.target.slots.padding, np.int32)
        rows[1] = 0
        rows[0, : len(slots)], rows[1, : len(slots)] = slots, counts
        self.transfers.upload(rows.ravel(), self.packed[: 2 * size])
        graphs, recorded = self.target.graphs, self.recorded[size, filters]
        starts = self.target.slots.lengths.starts(slots) if graphs.reads_lengths else None
        graphs.replay(recorded.first, () if starts is None else self.first_lengths(size, slots, starts))
        for depth in range(1, int(counts.max(initial=0))):
            lengths: np.ndarray | tuple[()] = ()
            if starts is not None:
                lengths = np.ones(size, np.int32)
                ends = starts - self.drafts.network.shift + depth + 1
                lengths[: len(slots)] = np.where(counts > depth, ends, 1)
            graphs.replay(recorded.next, lengths)
        reached = None
        if starts is not None:
            further = 0 if self.drafts.network.shift else np.maximum(counts - 1, 0)
            reached = starts - self.drafts.network.shift + 1 + further
        self.pending.reached_on_device(slots, reached)
        return self.tokens[: len(slots)]

    def first_lengths(self, size: int, slots: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """int32 [size * depth]: lengths of the first pass's rows of attention, 1 for padding."""
        columns = np.arange(self.pending.depth)
        ends = starts - self.drafts.network.shift + 1
        first = self.pending.depth - self.pending.counts(slots, ends, 1)
        lengths = np.ones((size, self.pending.depth), np.int32)
        positions = ends[:, None] - self.pending.depth + columns
        lengths[: len(slots)] = np.where(columns >= first[:, None], positions + 1, 1)
        return lengths.ravel()

    # ── captures ──────────────────────────────────────────────────────────────────────────────────────────

    def record(self, size: int, filters: Filters) -> RecordedDrafts:
        """The graphs of a size whose drafts are sampled with `filters`."""
        self.packed[: 2 * size] = 0
        self.packed[:size] = self.target.slots.padding
        bodies = [partial(self.first_body, filters, size), partial(self.next_body, filters, size)]
        return RecordedDrafts(*self.target.record(bodies))

    # ── bodies ────────────────────────────────────────────────────────────────────────────────────────────

    def first_body(self, filters: Filters, size: int) -> None:
        """Makes pending entries, and the first draft of each row."""
        pending, padding = self.pending, self.target.slots.padding
        slots = self.packed[: 2 * size].view(2, size)[0].long()
        ends = self.target.lengths[slots] - self.drafts.network.shift + 1
        counts = (ends - self.reach[slots]).clamp(1, pending.depth)
        columns = torch.arange(pending.depth, device=slots.device)
        is_pending = columns >= pending.depth - counts.unsqueeze(1)
        is_pending = is_pending & (slots != padding).unsqueeze(1)
        positions = ends.unsqueeze(1) - pending.depth + columns
        found = self.compute(
            torch.where(is_pending, slots.unsqueeze(1), padding).flatten(),
            torch.where(is_pending, positions, 0).flatten(),
            pending.tokens[slots].flatten(),
            pending.states[slots].flatten(0, 1),
            torch.arange(1, size + 1, device=slots.device) * pending.depth - 1,
        )
        self.reach.index_put_((slots,), ends)
        self.depth.zero_()
        self.put(filters, size, slots, found)

    def next_body(self, filters: Filters, size: int) -> None:
        """Makes the entry of each row's last draft, and one more draft."""
        slots, wanted = self.packed[: 2 * size].view(2, size).long()
        shift = self.drafts.network.shift
        is_active = wanted > self.depth
        positions = self.target.lengths[slots] - shift + self.depth
        found = self.compute(
            torch.where(is_active, slots, self.target.slots.padding),
            torch.where(is_active, positions, 0),
            self.last[:size],
            self.states[:size],
            torch.arange(size, device=slots.device),
        )
        if not shift:  # entries of drafts are the target's if they are accepted
            self.reach.index_put_((slots,), self.reach[slots] + is_active)
        self.put(filters, size, slots, found)

    def put(self, filters: Filters, size: int, slots: Tensor, found: Computed) -> None:
        """Samples a draft behind each row, as the target samples the token at its place."""
        ids = self.drafts.network.ids
        lengths = self.target.lengths[slots] + self.depth + 1
        tokens = self.target.sampled(found.logits, slots, lengths, filters)
        self.last[:size].copy_(tokens if ids is None else ids[tokens])
        self.tokens[:size].index_copy_(1, self.depth, self.last[:size].unsqueeze(1))
        if found.states is not None:
            self.states[:size].copy_(found.states)
        self.depth.add_(1)

    def keep_body(self, slots: Tensor, num: Tensor, tokens: Tensor, hidden: Tensor) -> None:
        """Keeps what a verify step has brought: of R `slots` the first `num` of the `tokens` [R, W], which
        were sampled behind `hidden`, [R * W, hidden]."""
        network, width = self.drafts.network, tokens.shape[1]
        columns = self.pending.columns(num)
        nodes = columns.clamp_min(0)
        states = None
        if network.shift:
            rows = torch.arange(len(slots), device=slots.device).unsqueeze(1) * width
            given = network.given(Forwarded(hidden))[(rows + nodes).flatten()]
            states = network.states_of(given).view(*nodes.shape, -1)
        self.pending.append_on_device(slots, columns, tokens.gather(1, nodes), states)

    def compute(
        self, slots: Tensor, positions: Tensor, tokens: Tensor, states: Tensor, samples: Tensor
    ) -> Computed:
        """A pass over an entry for each of `slots` at `positions`, int64 [N]; arguments as of
        Network.captured."""
        target, network = self.target, self.drafts.network
        tables = target.slots.page_tables[:1]
        shifts = target.shifts if network.has_token_grids else None
        batch = ForwardBatch(
            tokens,
            positions if shifts is None else positions + shifts[slots],
            locations(tables, slots, positions, target.page_size),
            self.drafts.kv,
            target.graphs.plan_decodes(slots, positions + 1, tables, target.page_size, network.windows),
            is_decode=True,
        )
        return network.captured(batch, states if network.shift else None, samples)

"""What the bodies of captured steps share: the target's forward, and sampling, with values read on the device
alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.devices.operands import DecodeRows, SlotTensors
from runtime.devices.step_graphs import Graph, Graphs
from runtime.devices.streams import Stream
from runtime.layers.fused_ops import fused_ops_of, locations
from runtime.layers.lora import LoraAdapters
from runtime.layers.parallel.group_tokens import open_group_tokens
from runtime.layers.sampling.sampler import clean
from runtime.models.base import CompiledLayer, GenerativeModel
from runtime.models.llama import Llama
from runtime.ranks.recurrent_states import RecurrentStates
from runtime.ranks.slots import Slots


@dataclass(frozen=True, slots=True)
class CapturedForward:
    """The model of a rank, its caches and its slots, as captured bodies use them."""

    device: Device
    graphs: Graphs
    model: GenerativeModel
    slots: Slots
    lengths: Tensor  # int64 [slots + 1], of SlotLengths.reserve
    kv: list[tuple[Tensor, ...]]
    page_size: int
    windows: tuple[int, ...]
    masks: bool = False  # layers must know which rows are padding
    adapters: LoraAdapters | None = None  # None: no LoRA adapters
    compiled: CompiledLayer | None = None  # computes captures of up to `compiled_rows` tokens
    compiled_rows: int = 0
    states: RecurrentStates | None = None  # None: no recurrent layers
    # int64 [slots + 1], of TokenGrids.reserve; None: rotary positions are those in the sequence
    shifts: Tensor | None = None

    @property
    def num_updates(self) -> int:
        """Rows of a captured step's page updates: slots, page-table rows and ids of each pool."""
        return 3 * len(self.slots.page_tables)

    def begin_decodes(self, packed: Tensor) -> DecodeRows:
        """The rows of a decode step, of its packed inputs, int32 [1 + 3 * pools, N]: slots and page updates.
        Those of padding set the padding slot's first page to the padding page, which it is already."""
        state = SlotTensors(self.slots.page_tables, self.lengths, self.slots.last_token)
        return fused_ops_of(self.device).begin_decodes(packed, state, self.page_size)

    def set_pages(self, updates: Tensor) -> None:
        """Page updates, int64 [3 * pools, P]; those of padding as in `begin_decodes`."""
        for pool, table in enumerate(self.slots.page_tables):
            at, row, ids = updates[3 * pool : 3 * pool + 3]
            table.index_put_((at, row), ids.int())

    def hidden(self, slots: Tensor, positions: Tensor, token_ids: Tensor, *, is_adapted: bool) -> Tensor:
        """Hidden states [N, hidden] of a token for each of `slots` at `positions`, int64 [N]. Tokens of one
        slot stand at consecutive positions, and each attends to those before it."""
        places = locations(self.slots.page_tables, slots, positions, self.page_size)
        return self.hidden_of(DecodeRows(slots, positions, token_ids, places), is_adapted=is_adapted)

    def hidden_of(self, rows: DecodeRows, *, is_adapted: bool) -> Tensor:
        """As `hidden`."""
        slots, positions, attention = rows.slots, rows.positions, rows.attention
        if self.adapters is not None:
            self.adapters.use_slots(slots if is_adapted else None)
        if self.kv and attention is None:
            tables = self.slots.page_tables
            attention = self.graphs.plan_decodes(slots, positions + 1, tables, self.page_size, self.windows)
        attended = self.device.attention
        num_groups = attended.layout.num_groups if attended is not None and self.device.has_groups else 0
        batch = ForwardBatch(
            rows.token_ids,
            positions if self.shifts is None else positions + self.shifts[slots],
            rows.locations,
            self.kv,
            attention if self.kv else None,
            is_decode=True,
            is_real=self.is_real(slots) if self.masks else None,
            group_tokens=(len(slots),) * num_groups,
            states=None if self.states is None else self.states.captured_rows(slots),
        )
        return self.model.forward(batch, self.compiled if len(slots) <= self.compiled_rows else None)

    def is_real(self, slots: Tensor) -> Tensor:
        """bool, False for padding, of the tokens that experts are given: those of `slots`, or where all ranks
        have them those of all attention groups."""
        is_real = slots != self.slots.padding
        groups = open_group_tokens(self.device) if self.device.all_to_all is None else None
        if groups is None or self.device.attention is None:
            return is_real
        counts = (len(slots),) * self.device.attention.layout.num_groups
        return groups.join(is_real.to(torch.int32), counts) > 0

    def greedy(self, hidden: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        """The likeliest token behind each of `hidden`, int64 [N], the same on all ranks. Where these have
        parts of one head, each finds the largest of its own logits."""
        head = self.model.lm_head if isinstance(self.model, Llama) else None
        if head is not None and head.is_divided and isinstance(self.model, Llama):
            return head.largest(self.model.logits(hidden, own=True))
        return self.sampled(self.model.logits(hidden), slots, lengths, None)

    def sampled(
        self,
        logits: Tensor,
        slots: Tensor,
        lengths: Tensor,
        filters: tuple[int, bool] | None,
        *,
        penalises: bool = False,
    ) -> Tensor:
        """Tokens at positions `lengths` of `slots`, int64 [N], the same on all ranks that have these slots:
        greedy ones, or sampled with `filters` (largest top_k, whether top_p). `logits` are overwritten."""
        tokens = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        ranks = self.device.group_ranks
        if ranks.rank == 0:
            clean(logits)
            if penalises:
                self.slots.penalties.apply_captured(logits, slots, lengths)
            inputs = None
            if filters is not None:
                inputs = fused_ops_of(self.device).sampling_inputs(slots, lengths, self.slots.params, filters)
            tokens = logits.argmax(dim=1) if inputs is None else self.device.ops.sample(logits, inputs)
            if penalises:
                self.slots.penalties.counts.add_captured(slots, tokens)
        return ranks.broadcast(tokens)

    def record(self, bodies: Sequence[Callable[[], None]], stream: Stream | None = None) -> list[Graph]:
        """The graph of each body. Each runs once before it is captured, over rows of padding: what allocates
        or compiles at its first call has done so. `stream`: of Graphs.capture.

        All of them run before the first is captured: captures exchange nothing, so a rank whose capture fails
        keeps no other rank waiting.
        """
        for body in bodies:
            body()
        return [self.graphs.capture(body, stream) for body in bodies]

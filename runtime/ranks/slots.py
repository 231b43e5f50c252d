"""What a rank keeps of each slot between steps: its pages (of one pool or two), its length, its last token
and how its tokens are sampled.

The tensors live on the device, so that a step can be launched before the last one's tokens are known; the
arrays next to them are the host's copy of what decides a branch.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import Ops
from runtime.devices.operands import LogitsOps, SlotParams, TokenMasks
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.fused_ops import penalise
from runtime.layers.sampling.grammar_masks import GrammarMasks
from runtime.layers.sampling.penalties import LogitsPenalties, Penalises
from runtime.layers.sampling.processors import Processors
from runtime.layers.sampling.sampler import Logprobs, clean, host_uniform
from runtime.layers.sampling.thresholds import EXACT, Thresholds
from runtime.layers.upload import PackedUpload, int64_tensor, upload, upload_int64
from runtime.messages.steps import Admit, SlotSampling, StepPlan
from runtime.ranks.cross_cache import CrossCache
from runtime.ranks.host_slots import HostSlots
from runtime.ranks.sample_rows import PackedRows, SampleRows
from runtime.ranks.sampling_needs import SamplingNeeds
from runtime.ranks.slot_lengths import SlotLengths
from runtime.ranks.token_grids import TokenGrids


class Slots:
    """State of `max_slots` sequences of at most `max_pages` pages each."""

    def __init__(
        self,
        max_slots: int,
        max_pages: int,
        vocab_size: int,
        torch_device: torch.device,
        num_pools: int = 1,
        grammar_masks: GrammarMasks | None = None,
        processors: Processors | None = None,
        penalises: Penalises = penalise,
        thresholds: Thresholds = EXACT,
        cross: CrossCache | None = None,
    ) -> None:
        """`thresholds`: of drafts that rows verify; `cross`: of a model that attends to sounds."""
        self.cross = cross
        self.thresholds = thresholds
        self.torch_device = torch_device
        self.vocab_size = vocab_size
        self.padding = max_slots  # a slot more, which no sequence has: of the padding rows of captured steps
        self.page_tables = torch.zeros(
            num_pools, max_slots + 1, max_pages, dtype=torch.int32, device=torch_device
        )
        self.lengths = SlotLengths(max_slots + 1, torch_device)
        self.last_token = torch.zeros(max_slots + 1, dtype=torch.int64, device=torch_device)
        self.floats = torch.ones(3, max_slots + 1, device=torch_device)  # temperature, top_p, min_p
        # seed, top_k
        self.ints = torch.zeros(2, max_slots + 1, dtype=torch.int64, device=torch_device).unbind()
        self.host: HostSlots | None = None  # views of these tensors, after `open_host`
        self.penalties = LogitsPenalties(vocab_size, torch_device, penalises)
        self.grammar_masks = grammar_masks or GrammarMasks(None, vocab_size)
        self.processors = processors or Processors([])
        self.needs = SamplingNeeds(max_slots, vocab_size)
        self.seeds = np.zeros(max_slots, dtype=np.int64)
        self.has_readers = False  # some slot is read or penalised, of those that were ever admitted to
        self.top_logprobs = np.full(max_slots, -1, dtype=np.int32)
        self.prompt_logprobs = np.full(max_slots, -1, dtype=np.int32)
        self.second_at = np.zeros(max_slots, dtype=np.int64)
        self.grids = TokenGrids(max_slots + 1, torch_device)
        # of the last step, by row of logits: tokens that a grammar forces after the sampled one
        self.forced: dict[int, list[int]] = {}
        # tokens whose log probabilities a slot asks for: the last columns of its width
        self.logprob_ids: dict[int, Tensor] = {}

    def open_host(self) -> None:
        """From now on the host reads and writes the tensors itself: their device computes nothing later."""
        self.host = HostSlots(self.page_tables, self.last_token, self.floats, self.ints[1])

    def update(self, plan: StepPlan, upload: PackedUpload | None = None) -> None:
        """Applies a plan's admits, then its page updates. With `upload`, which travels with the step, tensors
        change when it is sent; None: at once."""
        own = upload or PackedUpload(self.torch_device)
        if plan.admits:
            self._admit(plan.admits, own)
        if len(plan.page_ids):
            self._set_pages(0, plan.page_slots, plan.page_rows, plan.page_ids, own)
        if plan.window is not None:
            self._set_pages(1, plan.window.slots, plan.window.rows, plan.window.ids, own)
        if upload is None:
            own.send()

    def _set_pages(
        self, pool: int, slots: np.ndarray, rows: np.ndarray, ids: np.ndarray, upload: PackedUpload
    ) -> None:
        places, values, table = upload.int64(np.stack((slots, rows))), upload.add(ids, np.int32), pool
        upload.then(lambda: self.page_tables[table].index_put_(places.tensor.unbind(), values.tensor))

    def _admit(self, admits: list[Admit], upload: PackedUpload) -> None:
        for admit in admits:
            sampling = admit.sampling
            self.penalties.admit(admit)
            self.grammar_masks.admit(admit)
            self.processors.admit(admit)
            self.needs.admit(admit)
            self.seeds[admit.slot] = sampling.seed
            self.logprob_ids.pop(admit.slot, None)
            self.second_at[admit.slot] = admit.second_at
            self.grids.admit(admit.slot, admit.grids)
            self.top_logprobs[admit.slot] = sampling.top_logprobs
            self.prompt_logprobs[admit.slot] = sampling.prompt_logprobs
            if sampling.logprob_ids:
                self._admit_logprob_ids(admit.slot, sampling)
        self.has_readers = bool(self.needs.is_read.any() or self.needs.is_penalised.any())
        slots, params = [admit.slot for admit in admits], [admit.sampling for admit in admits]
        self.lengths.admit(slots, [admit.length for admit in admits], upload)
        index = upload.int64(np.array(slots))
        floats = upload.add(np.array([(p.temperature, p.top_p, p.min_p) for p in params], np.float32).T)
        ints = upload.int64(np.array([(p.seed, p.top_k) for p in params], np.int64).T)

        def put() -> None:
            self.floats[:, index.tensor] = floats.tensor
            for row, values in zip(self.ints, ints.tensor, strict=True):
                row[index.tensor] = values

        upload.then(put)

    def _admit_logprob_ids(self, slot: int, sampling: SlotSampling) -> None:
        self.logprob_ids[slot] = int64_tensor(sampling.logprob_ids, self.torch_device)
        for widths in (self.top_logprobs, self.prompt_logprobs):
            if widths[slot] >= 0:
                widths[slot] += len(sampling.logprob_ids)

    @property
    def follows(self) -> bool:
        """Whether a grammar, a processor or the bad words of some slot must know its tokens."""
        return bool(self.grammar_masks.slots or self.processors.slots or self.penalties.token_bans.words)

    @property
    def contextual(self) -> set[int]:
        """Slots whose logits depend on the tokens before, as this rank's host computes them."""
        return {
            *self.penalties.counts.rows,
            *self.penalties.token_bans.words,
            *self.processors.slots,
            *self.grammar_masks.slots,
        }

    def add_logprob_ids(self, found: Logprobs, logits: Tensor, rows: slice, slot: int, width: int) -> None:
        """Puts the tokens that the slot asks for by id in the last of its `width` columns."""
        ids = self.logprob_ids[slot]
        columns = slice(width - len(ids), width)
        found.top_ids[rows, columns] = ids.int()
        found.top[rows, columns] = logits[rows][:, ids] - logits[rows].logsumexp(dim=1, keepdim=True)

    def pack(self, plan: StepPlan, starts: np.ndarray, rows: SampleRows, upload: PackedUpload) -> SampleRows:
        """The rows, whose arrays travel with the step; those with drafts as they are. `starts`, int64 [R]:
        the lengths before the step."""
        if rows.drafts is not None or self.host is not None:
            return rows
        numbers = None
        if len(rows.slots) and self.needs.is_random[rows.slots].any():
            numbers = upload.add(host_uniform(self.seeds[rows.slots], rows.lengths))
        ends = self.lengths.pack_ends(plan.slots, starts + plan.kept_counts(), upload)
        return replace(
            rows, packed=PackedRows(upload.int64(rows.places), upload.int64(rows.slots), numbers, ends)
        )

    def sample(
        self, ops: Ops, logits_ops: LogitsOps, logits: Tensor, rows: SampleRows
    ) -> tuple[Tensor, Logprobs | None]:
        """Samples a token, int64 [N], for each row of logits; float32 logits [N, V] are overwritten.

        With log probabilities for all rows, as wide as the widest that is asked for, when a row asks for
        them.
        """
        slots, slot_list, lengths = rows.slots, rows.slots.tolist(), rows.lengths.tolist()
        if logits_ops.needs_finite or (
            self.has_readers and (self.needs.is_penalised[slots].any() or self.needs.is_read[slots].any())
        ):
            clean(logits)
        contexts = (
            {}
            if rows.drafts is None
            else rows.contexts(
                {*self.penalties.counts.rows, *self.penalties.token_bans.words, *self.processors.slots}
            )
        )
        changed = self.penalties.apply(logits, slot_list, lengths, contexts)
        if self.processors.slots:
            changed = self.processors.apply(changed, slot_list, contexts, is_own=changed is not logits)
        width = int(self.top_logprobs[slots].max()) if self.has_readers else -1
        masks = self._masks(rows) if self.grammar_masks.slots else None
        has_thresholds = rows.drafts is not None and not self.thresholds.is_exact
        if masks is not None:
            changed = changed if width < 0 or changed is not logits else changed.clone()
            if has_thresholds or not logits_ops.takes_masks:
                ops.mask(changed, *masks)
                masks = None
        if self.needs.is_random[slots].any():
            inputs = self.random_inputs(rows)
            tokens = logits_ops.choose(changed, inputs, masks)
            if rows.drafts is not None and has_thresholds:
                tokens = self.thresholds.accept(
                    clean(changed), inputs, tokens, rows.drafts, self.seeds[slots], rows.lengths
                )
        else:
            tokens = logits_ops.choose(changed, None, masks)
        if width < 0:
            return tokens, None
        found = Logprobs(*logits_ops.logprobs(logits, tokens, width))
        for row, slot in enumerate(slot_list if self.logprob_ids else ()):
            if slot in self.logprob_ids and self.top_logprobs[slot] >= 0:
                self.add_logprob_ids(found, logits, slice(row, row + 1), slot, int(self.top_logprobs[slot]))
        return tokens, found

    def random_inputs(self, rows: SampleRows) -> SamplingInputs:
        """What sampling needs of rows some of which are random."""
        slots, packed = rows.slots, rows.packed
        if packed is not None and packed.numbers is not None:
            numbers = packed.numbers.tensor
        else:
            numbers = upload(host_uniform(self.seeds[slots], rows.lengths), self.torch_device)
        filters = self.needs.filters(slots)
        if self.host is None:
            slots_there = upload_int64(slots, self.torch_device) if packed is None else packed.slots.tensor
            return self.sampling_inputs(slots_there, numbers, *filters)
        temperature, top_p, min_p, top_k = self.host.sampling(slots)
        return SamplingInputs(temperature, top_p, top_k, min_p, numbers, *filters)

    def _masks(self, rows: SampleRows) -> TokenMasks | None:
        """What the slots' grammars allow; None: they leave all rows free."""
        places, bits = self.grammar_masks.masks(rows.slots.tolist(), rows.lengths.tolist(), rows.drafts)
        self.forced = {place: run[1:] for place, run in self.grammar_masks.runs.items()}
        if not places:
            return None
        return TokenMasks(int64_tensor(places, self.torch_device), upload(bits, self.torch_device))

    @property
    def params(self) -> SlotParams:
        """How sequences are sampled, on the device."""
        return SlotParams(self.floats, self.ints[0], self.ints[1], self.vocab_size)

    def sampling_inputs(
        self, slots: Tensor, numbers: Tensor, largest_k: int, has_top_p: bool
    ) -> SamplingInputs:
        """What Ops.sample needs for `slots`, int64 [N] on the device, and their random numbers. `largest_k`
        and `has_top_p` are those of SamplingNeeds.filters."""
        temperature, top_p, min_p = self.floats.index_select(1, slots).unbind()
        top_k = self.ints[1].index_select(0, slots)
        return SamplingInputs(temperature, top_p, top_k, min_p, numbers, largest_k, has_top_p)

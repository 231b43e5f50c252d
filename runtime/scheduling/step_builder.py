"""Collects the rows of one step and packs them as a StepPlan."""

from collections.abc import Iterator

import numpy as np

from runtime.cache.sequence import Sequence
from runtime.cache.window import WindowSpan
from runtime.messages.lora import LoraAssignment
from runtime.messages.steps import (
    Admit,
    BlockSampling,
    PageCopies,
    Samples,
    SlotSampling,
    StateCopies,
    StepPlan,
    WindowPages,
)
from runtime.scheduling.drafts import Draft, Verified
from runtime.scheduling.encodings import Encodings, RowsBuilder, token_grids
from runtime.scheduling.hidden_states import Shown, ShownTokens
from runtime.scheduling.step_costs import Work

# an attribute of an enumeration is looked up slowly
LAST, ALL, BLOCK = int(Samples.LAST), int(Samples.ALL), int(Samples.BLOCK)
_NO_TOKENS = np.zeros(0, dtype=np.int32)
_MASK64 = (1 << 64) - 1


def sequence_seed(seed: int, index: int) -> int:
    """The int64 seed of the `index`-th sequence of a request; the first one keeps the request's own."""
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    return mixed - (1 << 64) if mixed >> 63 else mixed


def slot_sampling(sequence: Sequence, eos_ids: tuple[int, ...]) -> SlotSampling:
    """The sampling parameters of a sequence, for the ranks."""
    p = sequence.request.params
    stop_ids = [] if p.min_new_tokens == 0 else [*p.stop_token_ids, *(() if p.ignore_eos else eos_ids)]
    return SlotSampling(
        temperature=p.temperature,
        top_p=p.top_p,
        top_k=max(p.top_k, 0),
        min_p=p.min_p,
        frequency_penalty=p.frequency_penalty,
        presence_penalty=p.presence_penalty,
        repetition_penalty=p.repetition_penalty,
        seed=sequence_seed(sequence.request.seed, sequence.index),
        bias_ids=list(p.logit_bias),
        bias_values=list(p.logit_bias.values()),
        stop_ids=stop_ids,
        min_len=sequence.prompt_len + p.min_new_tokens,
        processor=p.processor,
        top_logprobs=p.top_logprobs if p.logprobs else -1,
        prompt_logprobs=p.prompt_logprobs
        if sequence.wants_prompt_logprobs and p.prompt_logprobs is not None
        else -1,
        logprob_ids=list(p.logprob_ids),
        token_bans=sequence.request.token_bans,
    )


class StepBuilder:
    """Rows in the order in which they will stand in the plan: decodes, verifies, extends."""

    def __init__(self, encodings: Encodings | None = None, blocks: BlockSampling | None = None) -> None:
        """`encodings`: where rows of images come from; None: the model takes text alone. `blocks`: of a
        diffusion model."""
        self._blocks = blocks
        self._encodings = encodings
        self._media = RowsBuilder()
        self.sequences: list[Sequence] = []  # one per row
        self.sampled: list[Sequence] = []  # those whose row samples, in row order
        self.verified: list[Verified] = []  # the verify rows
        self.num_decodes = 0
        self.num_known = 0  # tokens of the extend rows
        self._slots: list[int] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._samples: list[int] = []
        self._drafts: list[int] = []  # of the verify rows
        self._tokens: list[np.ndarray] = []  # of the extend rows
        self._targets: list[np.ndarray] = []
        self._admits: list[Admit] = []
        self._pages: list[tuple[int, int, int]] = []  # slot, page-table row, page
        self.state_slots: list[tuple[int, int]] = []  # of newcomers: slot, state slot
        self._window: list[tuple[int, int, int]] = []  # the same of the windows' pool
        self.hidden = ShownTokens()  # whose hidden states are wanted
        self.experts = ShownTokens()  # whose routed experts are wanted
        self.num_tokens = 0
        self._embeds: list[np.ndarray] = []
        self._embed_places: list[np.ndarray] = []

    def admit(self, sequence: Sequence, eos_ids: tuple[int, ...], lora_slot: int = -1) -> None:
        """`sequence` takes its slot, with all the pages it has; its adapter sits at `lora_slot`."""
        params = sequence.request.params
        has_history = (
            params.has_penalties
            or params.processor is not None
            or sequence.request.grammar_constraint is not None
            or sequence.request.has_bad_sequences
        )
        history = (
            np.array(sequence.text_ids(0, len(sequence.tokens)), dtype=np.int32)
            if has_history
            else _NO_TOKENS
        )
        self._admits.append(
            Admit(
                sequence.slot,
                slot_sampling(sequence, eos_ids),
                sequence.prompt_len,
                history,
                sequence.request.grammar_constraint,
                sequence.request.second_at,
                lora_slot,
                sequence.cached_len,
                token_grids(sequence.request.media),
            )
        )
        self._pages += [(sequence.slot, row, page) for row, page in enumerate(sequence.pages)]
        if sequence.state is not None:
            self.state_slots.append((sequence.slot, sequence.state.slot))

    def set_page(self, slot: int, row: int, page: int) -> None:
        """Adds an update of a page table."""
        self._pages.append((slot, row, page))

    def set_window(self, slot: int, window: WindowSpan) -> None:
        """Adds pages in the windows' pool that the ranks do not know yet."""
        self._window += [(slot, row, page) for row, page in window.take_unreported()]

    def add_decodes(self, sequences: list[Sequence], starts: list[int]) -> None:
        """One row each, which computes the last token sampled; it stands at `starts`, or before."""
        count = len(sequences)
        self.num_decodes = count
        self.sequences += sequences
        self.sampled += sequences
        self._slots += [s.slot for s in sequences]
        self._starts += starts
        self._counts += [1] * count
        self._samples += [1] * count
        self.num_tokens += count

    def add_verify(self, sequence: Sequence, draft: Draft, start: int) -> None:
        """A row of the last token sampled, which stands at `start` or before, and of drafts after it."""
        self.verified.append(Verified(len(self.sampled), draft))
        self.sequences.append(sequence)
        self.sampled.append(sequence)
        self._slots.append(sequence.slot)
        self._starts.append(start)
        count = len(draft.tokens) + 1
        self._counts.append(count)
        self._samples.append(LAST if draft.is_sure else ALL)
        self._drafts += draft.tokens
        self.num_tokens += count

    def add_extend(self, sequence: Sequence, start: int, count: int) -> None:
        """A row of `count` known tokens from `start`; samples if they are the last known ones."""
        stop = start + count
        is_last = stop == len(sequence.tokens) and self._blocks is None
        self.sequences.append(sequence)
        self._slots.append(sequence.slot)
        self._starts.append(start)
        self._counts.append(count)
        self._samples.append(int(is_last))
        if is_last:
            self.sampled.append(sequence)
        self._tokens.append(np.array(sequence.text_ids(start, stop), dtype=np.int32))
        if sequence.request.media and self._encodings is not None:
            for positions, id, begin in self._encodings.rows_of(sequence, start, stop):
                self._media.add(positions - start + self.num_tokens, id, begin)
        if sequence.request.embeds is not None and start < sequence.prompt_len:
            embeds = sequence.request.embeds[start : min(stop, sequence.prompt_len)]
            self._embeds.append(embeds.ravel())
            self._embed_places.append(
                np.arange(self.num_tokens, self.num_tokens + len(embeds), dtype=np.int32)
            )
        params, end = sequence.request.params, self.num_tokens + count
        for reported, is_wanted, is_prompt in (
            (self.hidden, params.hidden_states is not None, sequence.wants_prompt_hidden),
            (self.experts, params.routed_experts is not None, sequence.wants_prompt_experts),
        ):
            if is_wanted and (is_last or is_prompt):
                reported.add(Shown(sequence, count if is_prompt else 1, is_prompt, is_last), end)
        self.num_tokens += count
        self.num_known += count
        if sequence.wants_prompt_logprobs:
            targets = np.full(count, -1, dtype=np.int32)
            known = sequence.text_ids(start + 1, stop + 1)
            targets[: len(known)] = known
            self._targets.append(targets)

    def add_block(self, sequence: Sequence, block: list[int]) -> None:
        """A row of a block that is being filled in, behind the known blocks that are not computed yet."""
        start, stop = sequence.computed_len, sequence.extend_len
        count = stop - start + len(block)
        self.sequences.append(sequence)
        self.sampled.append(sequence)
        self._slots.append(sequence.slot)
        self._starts.append(start)
        self._counts.append(count)
        self._samples.append(BLOCK)
        self._tokens.append(np.array([*sequence.text_ids(start, stop), *block], dtype=np.int32))
        self.num_tokens += count

    def show_decodes(self) -> None:
        """Some of those that decode want to see hidden states or routed experts."""
        for row, sequence in enumerate(self.sequences):
            shown, params = Shown(sequence, 1, is_prompt=False, is_last=True), sequence.request.params
            if params.hidden_states is not None:
                self.hidden.add(shown, row + 1)
            if params.routed_experts is not None:
                self.experts.add(shown, row + 1)

    def computed(self) -> Iterator[tuple[Sequence, int]]:
        """Each row's sequence and number of tokens."""
        return zip(self.sequences, self._counts, strict=True)

    def work(self) -> Work:
        """How much the rows so far compute."""
        starts, counts = self._starts[self.num_decodes :], self._counts[self.num_decodes :]
        attended = sum(
            count * start + count * count // 2 for start, count in zip(starts, counts, strict=True)
        )
        return Work(self.num_decodes, sum(counts), attended, sum(self._starts[: self.num_decodes]))

    def build(
        self,
        step: int,
        page_copies: PageCopies | None = None,
        states: StateCopies | None = None,
        lora_assignment: LoraAssignment | None = None,
        *,
        follows: bool = False,
    ) -> StepPlan:
        """The plan of these rows; nothing is added afterwards."""
        slots, rows, pages = zip(*self._pages, strict=True) if self._pages else ((), (), ())
        return StepPlan(
            step=step,
            num_decodes=self.num_decodes,
            num_verifies=len(self.verified),
            admits=self._admits,
            slots=np.array(self._slots, dtype=np.int32),
            counts=np.array(self._counts, dtype=np.int32),
            samples=np.array(self._samples, dtype=np.uint8),
            token_ids=self._token_ids(),
            page_slots=np.array(slots, dtype=np.int32),
            page_rows=np.array(rows, dtype=np.int32),
            page_ids=np.array(pages, dtype=np.int32),
            prompt_targets=np.concatenate(self._targets) if self._targets else _NO_TOKENS,
            draft_parents=draft_parents([row.draft for row in self.verified]) if self.verified else None,
            page_copies=page_copies,
            window=self._window_pages(),
            states=states,
            shown=self.hidden.places(),
            routed=self.experts.places(),
            embed_places=_joined(self._embed_places),
            embeds=_joined(self._embeds),
            media=self._media.build(),
            lora_assignment=lora_assignment,
            follows=follows,
            blocks=self._blocks,
        )

    def _token_ids(self) -> np.ndarray:
        drafts = np.array(self._drafts, dtype=np.int32) if self._drafts else _NO_TOKENS
        return np.concatenate((drafts, *self._tokens)) if self._tokens else drafts

    def _window_pages(self) -> WindowPages | None:
        return WindowPages(*np.array(self._window, dtype=np.int32).T.copy()) if self._window else None


def draft_parents(drafts: list[Draft]) -> np.ndarray | None:
    """`StepPlan.draft_parents`; None where all drafts are chains."""
    if all(draft.parents is None for draft in drafts):
        return None
    chains = [range(len(draft.tokens)) if draft.parents is None else draft.parents for draft in drafts]
    return np.array([parent for parents in chains for parent in parents], dtype=np.int32)


def _joined(arrays: list[np.ndarray]) -> np.ndarray | None:
    return np.concatenate(arrays) if arrays else None

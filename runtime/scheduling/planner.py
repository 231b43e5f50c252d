"""Plans one step: which sequences decode, verify, extend, are admitted or are preempted."""

from collections.abc import Callable

from runtime.cache.sequence import Sequence
from runtime.messages.requests import CacheSources
from runtime.messages.steps import PageCopies, StepPlan
from runtime.scheduling.admission import Admission
from runtime.scheduling.chunking import Chunking
from runtime.scheduling.delayer import Delayer, JointDelayer, replica_of
from runtime.scheduling.diffusion.algorithms import Diffusion
from runtime.scheduling.diffusion.block_planner import BlockPlanner
from runtime.scheduling.draft_planner import DraftPlanner
from runtime.scheduling.drafts import Draft, Drafter, planned
from runtime.scheduling.encode_costs import BOUND_SHARE, ENCODE_S
from runtime.scheduling.encodings import Encodings
from runtime.scheduling.extend_planner import ExtendPlanner
from runtime.scheduling.flight import Fill, Flight
from runtime.scheduling.hidden_states import TokenReports
from runtime.scheduling.logprobs import PromptCollector, PromptPart
from runtime.scheduling.micro_batches import MicroBatches
from runtime.scheduling.roster import Roster
from runtime.scheduling.step_builder import StepBuilder
from runtime.scheduling.totals import Totals

ONE_BATCH = MicroBatches()

RETRY_STEPS = 8  # after which room is looked for again although no sequence has left


class Planner:
    """One plan after the other over one roster."""

    def __init__(
        self,
        roster: Roster,
        prompts: PromptCollector,
        *,
        admission: Admission,
        eos_ids: tuple[int, ...],
        on_delayed: Callable[[str, int, float], None] = lambda reason, steps, seconds: None,
        drafter: Drafter | None = None,
        micro_batches: MicroBatches = ONE_BATCH,
        encodings: Encodings | None = None,
        diffusion: Diffusion | None = None,
    ) -> None:
        """`on_delayed` is called for each delay that the prefill delayer ends: reason, steps, seconds;
        `encodings`: of images, None for a model of text alone; `diffusion`: None for a model that samples
        one token after the other."""
        self.encodings = encodings
        self.roster = roster
        self.prompts = prompts
        self.admission = admission
        self.micro_batches = micro_batches
        self.eos_ids = eos_ids
        self.totals = Totals()
        self.hidden = TokenReports()
        self.experts = TokenReports()
        # ids of sequences that were admitted for the first time since take_admitted
        self.admitted: list[int] = []
        is_equal, bound_s = admission.has_dynamic_chunks, admission.max_step_s
        chunking = Chunking(roster.cache.page_size, bound_s=bound_s, is_equal=is_equal)
        self.chunking = chunking if is_equal or bound_s else None
        self.extends = ExtendPlanner(roster, admission, self.chunking, encodings, samples=diffusion is None)
        self.delayer: Delayer | JointDelayer | None = (
            Delayer(admission.delay_steps, admission.delay_watermark, on_admit=on_delayed)
            if admission.delay_steps
            else None
        )
        self.drafts = DraftPlanner(roster, drafter, admission.max_step_tokens)
        self.blocks = None if diffusion is None else BlockPlanner(roster, diffusion)
        self._last_admission = 0  # the step
        self._no_room = (-1, 0, 0)  # for whom there was none, and when

    def plan(self) -> tuple[StepPlan, Flight] | None:
        """The next step, or None when there is nothing to compute and nothing to move now."""
        roster = self.roster
        self._begin()
        builder = StepBuilder(self.encodings, None if self.blocks is None else self.blocks.sampling)
        parts: dict[int, PromptPart] = {}
        if self.blocks is None:
            self._decode(builder)
        else:
            self.blocks.plan(builder, self._grow)
        if roster.extending or (
            (roster.waiting.has_ready or roster.lora_slots.waiting) and roster.has_free_slot
        ):
            self._fill(builder, parts)
            if self.blocks is not None:  # newcomers whose blocks are all in the cache
                self.blocks.plan(builder, self._grow)
        step = self.totals.steps + 1
        page_copies, states = roster.cache.host.take(step), roster.cache.states
        state_copies = None if states is None else states.take(builder.state_slots, step)
        if not builder.sequences and page_copies is None and state_copies is None:
            return None
        self._count(step, builder, page_copies)
        flight = Flight(
            step,
            builder.sequences,
            builder.sampled,
            parts,
            builder.work() if self.chunking is not None and builder.sequences else None,
            self.hidden.expect(builder.hidden.rows),
            self.experts.expect(builder.experts.rows),
            builder.verified,
            None if builder.num_known else sum(len(row.draft.tokens) for row in builder.verified),
            [] if self.encodings is None else self.encodings.take_made(),
        )
        follows = self.drafts.follows(builder)
        plan = builder.build(step, page_copies, state_copies, roster.lora_slots.take(), follows=follows)
        return plan, flight

    def _begin(self) -> None:
        """A step is about to be planned."""
        roster = self.roster
        roster.begin()
        roster.cache.host.begin()
        roster.lora_slots.release(roster.waiting)
        if roster.waiting.has_ready:
            roster.waiting.turn += 1
            if roster.has_levels:
                self._make_way()
        if self.encodings is not None:
            self.encodings.begin()

    def _count(self, step: int, builder: StepBuilder, page_copies: PageCopies | None) -> None:
        """The step is taken: it counts in the totals, and for those who share the server."""
        totals, shares = self.totals, self.roster.shares
        totals.steps = step
        if self.micro_batches.count > 1:
            for sequence in builder.sampled:
                sequence.sampled_at = step
        if builder.num_known:
            totals.prompt_steps += 1
            totals.known_tokens += builder.num_known
        elif builder.verified:
            totals.verify_steps += 1
        if page_copies is not None:
            totals.saved_pages += len(page_copies.save_pages) + len(page_copies.computed_pages)
        if shares.is_on and builder.sequences:
            shares.charge_decodes()

    def _decode(self, builder: StepBuilder) -> None:
        """A row for each decoding sequence that may still grow, with drafts where there are some; when pages
        run out the last in precedence give way."""
        roster, page_size = self.roster, self.roster.cache.page_size
        asks = self.drafts.begin()
        budget = self.drafts.budget() if asks else 0
        pending = self.drafts.pending
        rows, starts = list[Sequence](), list[int]()
        drafted: list[tuple[Sequence, Draft, int]] = []
        for sequence in self.micro_batches.decoding(roster, self.totals.steps + 1):
            start = sequence.computed_len
            if start + 1 >= sequence.max_len:  # its last token is in flight
                continue
            if asks and (start >= sequence.draft_from or (pending and sequence.id in pending)):
                found = self._verify(sequence, builder, budget)
                if found is None:
                    continue
                start, draft = found
                if draft is not None:
                    budget -= len(draft.tokens)
                    planned(sequence, draft)
                    drafted.append((sequence, draft, start))
                    continue
            elif start == len(sequence.pages) * page_size:
                if not self._grow(sequence):
                    continue
                builder.set_page(sequence.slot, len(sequence.pages) - 1, sequence.pages[-1])
                if sequence.window is not None:
                    builder.set_window(sequence.slot, sequence.window)
            sequence.computed_len += 1
            sequence.in_flight += 1
            rows.append(sequence)
            starts.append(start)
        builder.add_decodes(rows, starts)
        if roster.num_shown:
            builder.show_decodes()
        for sequence, draft, start in drafted:
            builder.add_verify(sequence, draft, start)
            rows.append(sequence)
            starts.append(start + len(draft.tokens))
        if (states := roster.cache.states) is not None:
            certain = [i for i, sequence in enumerate(rows) if not sequence.drafting]
            states.decoded([rows[i] for i in certain], [starts[i] for i in certain])
        if asks:
            self.drafts.planned([sequence for sequence, _, _ in drafted])

    def _grow(self, sequence: Sequence) -> bool:
        """One more page, taken from the last in precedence if need be. False: that was the sequence itself,
        and it gave way."""
        while not self.roster.cache.grow(sequence):
            victim = self.roster.last()
            self.roster.forecast.preempted()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _verify(
        self, sequence: Sequence, builder: StepBuilder, budget: int
    ) -> tuple[int, Draft | None] | None:
        """Where the first token of a sequence's row stands at most, as drafts in flight may put it, and its
        drafts; None: it has no row. Pages are taken for that, and positions are the ranks' own."""
        start, pages, cache = sequence.computed_len + sequence.drafting, sequence.pages, self.roster.cache
        if start + 1 >= sequence.max_len:  # its last token may be in flight
            return None
        first = len(pages)
        # a page that may not be needed is taken from no other sequence
        if start >= first * cache.page_size and not (
            cache.grow(sequence) if sequence.drafting else self._grow(sequence)
        ):
            return None
        draft = None
        if start >= sequence.draft_from or sequence.forced:
            draft = self.drafts.draft(sequence, start, budget)
        if first < len(pages):
            for row in range(first, len(pages)):
                builder.set_page(sequence.slot, row, pages[row])
            if sequence.window is not None:
                builder.set_window(sequence.slot, sequence.window)
        return start, draft

    def _preempt(self, victim: Sequence) -> None:
        self.totals.preemptions += 1
        self.put_back(victim)

    def drop_reports(self, sequence: Sequence) -> None:
        """What was reported of a prompt that is not complete counts no more."""
        self.hidden.drop(sequence)
        self.experts.drop(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A running sequence gives way to others."""
        if not sequence.is_decoding:  # it computes its prompt anew; else the rest of the prompt is in flight
            self.prompts.drop(sequence)
            self.drop_reports(sequence)
        self.roster.put_back(sequence)

    def _make_way(self) -> None:
        """Running sequences give way to the head of the queue if its priority is better by enough, and if
        that makes room."""
        roster = self.roster
        head = roster.lora_slots.head(roster.waiting)
        if head is None or not roster.num_running:
            return
        worst_level = head.level + roster.order.preemption_threshold
        if roster.last().level < worst_level or roster.has_room(head):
            return
        victims = [s for s in (*roster.extending, *roster.decoding) if s.level >= worst_level]
        if roster.cache.missing(head) > roster.cache.num_available + sum(len(s.pages) for s in victims):
            return
        while roster.num_running and roster.last().level >= worst_level and not roster.has_room(head):
            self.totals.priority_preemptions += 1
            self._preempt(roster.last())

    def _fill(self, builder: StepBuilder, parts: dict[int, PromptPart]) -> None:
        """Known tokens: of prompts that are under way, then of new sequences; what these leave goes to long
        prompts."""
        roster, admission = self.roster, self.admission
        num_drafts = builder.num_tokens - len(builder.sequences) if admission.has_chunks else 0
        size = admission.max_step_tokens - num_drafts
        is_due = not roster.decoding or self.totals.steps + 1 - self._last_admission >= admission.decode_steps
        has_others = len(roster.extending) > 1 or (roster.has_free_slot and roster.waiting.has_ready)
        fill = Fill(size, int(size * admission.long_share) if has_others else size, {})
        if self.chunking is not None:
            self.chunking.begin(builder.work())
        if self.encodings is not None and admission.has_chunks:
            left_s = None if self.chunking is None else self.chunking.left_s
            if builder.sequences:
                self.encodings.bound(ENCODE_S if left_s is None else left_s * BOUND_SHARE)
            elif roster.decoding and self.micro_batches.count > 1:
                self.encodings.bound(None)
        for sequence in roster.extending:
            self.extends.extend(sequence, fill)
        decodes = bool(builder.sequences)
        if is_due and (self.delayer is None or fill.rows or self._may_start(self.delayer, decodes=decodes)):
            self._admit(fill, builder)
        if fill.left and has_others:
            fill.long_left = fill.left
            for sequence in roster.extending:
                self.extends.extend(sequence, fill)
        elif has_others and not fill.long_left:
            self.totals.held_back += 1
        self._add_extends(fill, builder, parts)
        roster.promote()

    def _add_extends(self, fill: Fill, builder: StepBuilder, parts: dict[int, PromptPart]) -> None:
        """A row for each sequence of `fill`, and what counts its tokens."""
        roster = self.roster
        for sequence, start in fill.rows.values():
            count = sequence.computed_len - start
            builder.add_extend(sequence, start, count)
            if sequence.window is not None:
                builder.set_window(sequence.slot, sequence.window)
            if roster.cache.states is not None:
                roster.cache.states.computed(sequence)
            roster.shares.charge(sequence.request.tenant, count)
            if sequence.wants_prompt_logprobs:
                parts[sequence.slot] = self.prompts.expect(sequence, start, count)

    def _may_start(self, delayer: Delayer | JointDelayer, *, decodes: bool) -> bool:
        """Whether newcomers start now, or wait for more of them."""
        own = replica_of(self.roster, self.admission, decodes=decodes)
        return own.has_prompts and delayer.admits([own])

    def _admit(self, fill: Fill, builder: StepBuilder) -> None:
        """Takes waiting sequences in order while slots, pages and the step's tokens last."""
        roster, admission = self.roster, self.admission
        roster.lora_slots.release(roster.waiting)
        while (
            fill.left
            and roster.has_free_slot
            and (sequence := roster.lora_slots.head(roster.waiting)) is not None
        ):
            if admission.max_prompts is not None and len(fill.rows) >= admission.max_prompts:
                return
            if fill.rows and self.chunking is not None and self.chunking.is_full:
                return
            if not admission.has_chunks and fill.rows and len(sequence.tokens) > fill.left:
                return
            if not self._has_room(sequence):
                return
            roster.start(sequence)
            if sequence.first_cached_len < 0:
                sequence.first_cached_len = sequence.cached_len
                if sequence.loaded_len:
                    fetched = min(sequence.fetched_len, sequence.loaded_len)
                    sequence.first_sources = CacheSources(sequence.loaded_len - fetched, fetched)
                self.admitted.append(sequence.id)
                self.totals.prompt_tokens += sequence.prompt_len
                self.totals.cached_tokens += sequence.cached_len
                self.totals.loaded_tokens += sequence.loaded_len
            builder.admit(sequence, self.eos_ids, roster.lora_slots.index(sequence))
            self._last_admission = self.totals.steps + 1
            self.extends.extend(sequence, fill)

    def _has_room(self, sequence: Sequence) -> bool:
        """Asks again when a sequence has left, or after a few steps: the answer may cost a look at all that
        run."""
        state = (sequence.id, self.roster.num_left, self.totals.steps // RETRY_STEPS)
        if self._no_room == state:
            return False
        if self.roster.has_room(sequence):
            return True
        self._no_room = state
        return False

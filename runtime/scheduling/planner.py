"""Plans one step: who decodes, who extends, who is admitted, who gives way."""

from collections.abc import Iterable

from msgspec import Struct

from runtime.messages import StepPlan
from runtime.request import Sequence
from runtime.scheduling.builder import StepBuilder
from runtime.scheduling.logprobs import PromptCollector, PromptPart
from runtime.scheduling.roster import Roster


class Flight(Struct, frozen=True):
    """What must be remembered of a submitted step: the sequences that it computes and those of them that it samples, in row
    order, and prompt parts by slot."""

    step: int
    computed: list[Sequence]
    sampled: list[Sequence]
    prompt_parts: dict[int, PromptPart]


class Totals(Struct):
    """What the planner has done since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


class Planner:
    """One plan after the other over one roster. `max_step_tokens` bounds the known tokens that a step computes."""

    def __init__(self, roster: Roster, prompts: PromptCollector, *, max_step_tokens: int, eos_ids: tuple[int, ...]) -> None:
        self.roster = roster
        self.prompts = prompts
        self.max_step_tokens = max_step_tokens
        self.eos_ids = eos_ids
        self.totals = Totals()
        self.admitted: list[int] = []  # ids of sequences that were admitted for the first time, until somebody takes them

    def plan(self) -> tuple[StepPlan, Flight] | None:
        """The next step, or None when there is nothing to compute now."""
        builder = StepBuilder()
        parts: dict[int, PromptPart] = {}
        self._decode(builder)
        budget = self.max_step_tokens
        for sequence in self.roster.extending:
            budget -= self._extend(sequence, budget, builder, parts)
            if budget == 0:
                break
        if budget and self.roster.has_free_slot and len(self.roster.waiting):
            self._admit(budget, builder, parts)
        self.roster.promote()
        if not builder.sequences:
            return None
        self.totals.steps += 1
        return builder.build(self.totals.steps), Flight(self.totals.steps, builder.sequences, builder.sampled, parts)

    def _decode(self, builder: StepBuilder) -> None:
        """A row for each decoding sequence that may still grow; when pages run out the youngest give way."""
        page_size = self.roster.cache.page_size
        rows: list[Sequence] = []
        starts: list[int] = []
        for sequence in _as_it_shrinks(self.roster.decoding):
            start = sequence.computed_len
            if start + 1 >= sequence.max_len:  # its last token is in flight
                continue
            if start == len(sequence.pages) * page_size:
                if not self._grow(sequence):
                    continue
                builder.set_page(sequence.slot, len(sequence.pages) - 1, sequence.pages[-1])
            sequence.computed_len = start + 1
            sequence.in_flight += 1
            rows.append(sequence)
            starts.append(start)
        builder.add_decodes(rows, starts)

    def _grow(self, sequence: Sequence) -> bool:
        """One more page, taken from the youngest if need be. False: the sequence was the youngest, and gave way itself."""
        while not self.roster.cache.grow(sequence):
            victim = self.roster.youngest()
            self.totals.preemptions += 1
            self.put_back(victim)
            if victim is sequence:
                return False
        return True

    def put_back(self, sequence: Sequence) -> None:
        """A running sequence gives way to others."""
        if not sequence.is_decoding:  # it computes its prompt anew; else the rest of the prompt is in flight
            self.prompts.drop(sequence)
        self.roster.put_back(sequence)

    def _admit(self, budget: int, builder: StepBuilder, parts: dict[int, PromptPart]) -> None:
        """Takes waiting sequences in order while slots, pages and the step's budget last."""
        for sequence in self.roster.waiting.ready(self.roster.is_ready):
            if budget == 0 or not self.roster.has_free_slot or not self.roster.start(sequence):
                return
            if sequence.first_cached_len < 0:
                sequence.first_cached_len = sequence.cached_len
                self.admitted.append(sequence.id)
                self.totals.prompt_tokens += sequence.prompt_len
                self.totals.cached_tokens += sequence.cached_len
            builder.admit(sequence, self.eos_ids)
            budget -= self._extend(sequence, budget, builder, parts)

    def _extend(self, sequence: Sequence, budget: int, builder: StepBuilder, parts: dict[int, PromptPart]) -> int:
        """A row of at most `budget` known tokens. -> tokens planned"""
        start = sequence.computed_len
        count = min(budget, len(sequence.tokens) - start)
        builder.add_extend(sequence, start, count)
        if sequence.wants_prompt_logprobs:
            parts[sequence.slot] = self.prompts.expect(sequence, start, count)
        sequence.computed_len = start + count
        if sequence.computed_len == len(sequence.tokens):
            sequence.in_flight += 1
        self.roster.cache.publish(sequence)
        return count


def _as_it_shrinks(sequences: list[Sequence]) -> Iterable[Sequence]:
    """Iterates while items behind the current one may be removed (the youngest stand last)."""
    index = 0
    while index < len(sequences):
        yield sequences[index]
        index += 1

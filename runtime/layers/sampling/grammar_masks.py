"""Grammars of the slots, on the rank that samples: which tokens each of them may take next.

A token is known here first, so its grammar is here too: no mask ever waits for the event loop, and steps stay
in flight as they are. `took` only records a step's tokens; the work is done in `masks`, when the next step's
forward has been launched and the device is busy.

Jump-forward: where the grammar forces a *run* of tokens, the matcher takes it at once, and until the sequence
is as long the mask of each position allows the run's token alone. So a run is the same whether the scheduler
learns of it (`runs`) and drafts it, or not and its tokens are sampled one by one; and steps that are in
flight meanwhile sample tokens of the run.

Along drafts (verify rows) the masks follow copies of the matcher; the copy at the last accepted draft
replaces the slot's own.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, thread_time
from typing import TypeVar

import numpy as np

from runtime.grammar.backend import Compiled, Matcher
from runtime.grammar.guard import Guard, StuckError
from runtime.grammar.trial import Stopwatch
from runtime.layers.sampling.compiled_grammars import CompiledGrammars
from runtime.layers.sampling.thinking import ThinkingBudget
from runtime.layers.sampling.verify import DraftRows
from runtime.messages.constraint import Grammar, GrammarSetup
from runtime.messages.requests import GrammarConstraint
from runtime.messages.steps import Admit

T = TypeVar("T")

# With two steps in flight a run of n tokens saves n - 2 steps, and its verify row costs more than a decode.
# So
# runs are reported from SHORTEST tokens on, and among more than FEW sequences, which take their steps anyway,
# from LONG tokens on.
FEW, SHORTEST, LONG = 2, 4, 8


class SlotGrammar:
    """One slot. The grammar holds from where one of its `after_ids` was generated up to the token that ends
    the text; before, reasoning may have a budget."""

    def __init__(
        self,
        grammar_constraint: GrammarConstraint,
        compiled: Compiled | None,
        enter: Callable[["SlotGrammar"], float] = lambda slot: thread_time(),
    ) -> None:
        """`compiled` None: there is none, because the backend gave up. `enter` is called before each
        operation of the library, and says `thread_time`."""
        self.slot = self  # of which this one is a copy that follows drafts
        self.enter = enter
        self.grammar_constraint = grammar_constraint
        self.matcher: Matcher | None = None if compiled is None else compiled.matcher()
        has_grammar = grammar_constraint.grammar is not None
        self.is_lost = has_grammar and compiled is None
        self.is_on = has_grammar and not grammar_constraint.after_ids
        thinking = grammar_constraint.thinking
        self.thinking = None if thinking is None else ThinkingBudget(thinking)
        self.is_ended = False
        self._tail: list[int] = []  # the latest tokens, while it waits for `after_ids`
        self.pending: int | None = None  # taken, but the grammar has not been told
        self.watch = Stopwatch()
        self.length = 0  # of the sequence as the matcher knows it, with a run that is to come
        self.run: list[int] = []  # the last tokens of it, where they are forced

    def begin(self, prompt_len: int, tokens: list[int]) -> None:
        """A prompt, and what was generated before the sequence came here."""
        self.length = prompt_len
        self.look()
        for length, token in enumerate(tokens, prompt_len + 1):
            self.advance(token, length)
            self.look()

    def advance(self, token: int, length: int) -> None:
        """The sequence has come to `length` tokens with `token`."""
        if length > self.length:
            self.length, self.run = length, []
            self._tell(token)

    def look(self) -> int:
        """Takes the run that is forced from here, if there is one, and says how long it is. What ends the
        text is never part of it."""
        if self.is_lost or self.run:
            return 0
        if count := self.cut_reasoning():
            return count
        if not self.is_masked:
            return 0
        assert self.matcher is not None
        began = self._begin()
        for token in self.matcher.jump_forward():
            if token in self.grammar_constraint.stop_ids:
                break
            self.enter(self.slot)
            if not self.matcher.accept(token):
                self.is_lost = True
                return 0
            self.run.append(token)
        self.length += len(self.run)
        self.is_lost = self.watch.is_over(*began)
        return len(self.run)

    def cut_reasoning(self) -> int:
        """Takes the tokens that end reasoning whose budget is used up, and says how many."""
        if self.thinking is None or self.is_lost or self.is_ended or self.run:
            return 0
        run = self.thinking.cut()
        for token in run:
            self._tell(token)
        if run:
            self.run = run
            self.length += len(run)
        return len(run)

    def _tell(self, token: int) -> None:
        if self.is_ended or self.is_lost:
            return
        if self.thinking is not None:
            self.thinking.tell(token)
        if token in self.grammar_constraint.stop_ids:
            self.is_ended = True
        elif self.is_on:
            assert self.matcher is not None
            began = self._begin()
            self.is_lost = not self.matcher.accept(token) or self.watch.is_over(*began)
        elif self.grammar_constraint.after_ids:
            self._tail = [*self._tail, token][-max(map(len, self.grammar_constraint.after_ids)) :]
            self.is_on = any(
                [self._tail[-len(ids) :] == list(ids) for ids in self.grammar_constraint.after_ids]
            )

    def fill(self, bits: np.ndarray) -> None:
        """Sets the bits of the tokens that may come next."""
        assert self.matcher is not None
        began = self._begin()
        self.is_lost = not self.matcher.fill(bits) or self.watch.is_over(*began)

    def _begin(self) -> tuple[float, float]:
        """When an operation of the library begins, as Stopwatch.is_over takes it."""
        return self.enter(self.slot), perf_counter()

    def settle(self, length: int) -> None:
        """The sequence is `length` tokens long, and what it took last is pending."""
        if self.pending is not None:
            token, self.pending = self.pending, None
            self.advance(token, length)

    def after(self, token: int, length: int) -> "SlotGrammar | None":
        """Where a sequence is that goes on with the draft `token` to `length` tokens; this one stays where it
        is. None: the grammar does not allow it."""
        if length <= self.length:
            return self  # within a run, whose tokens alone are allowed
        further = copy.copy(self)
        self.enter(self.slot)
        further.matcher = None if self.matcher is None else self.matcher.fork()
        further.pending = None
        further.thinking = copy.copy(self.thinking)
        further.advance(token, length)
        return None if further.is_lost else further

    @property
    def excluded(self) -> list[int]:
        """Tokens that may not come because reasoning is beyond its budget."""
        return [] if self.thinking is None or self.is_ended else self.thinking.excluded()

    @property
    def is_masked(self) -> bool:
        """Whether the next token is constrained."""
        return self.is_lost or (self.is_on and not self.is_ended)


class GrammarMasks:
    """All slots with a grammar. The backend is opened by the first of them."""

    def __init__(self, setup: GrammarSetup | None, vocab_size: int, *, samples: bool = True) -> None:
        """`setup` None: there are no grammars here. `samples`: this rank chooses the tokens."""
        self._samples = samples
        self.slots: dict[int, SlotGrammar] = {}
        # of the last `masks`, by place: all of a run that begins there, if it is worth telling
        self.runs: dict[int, list[int]] = {}
        # of the last `masks` with drafts, by place: where the sequence is, as far as its grammar allows it
        self._walked: dict[int, SlotGrammar | None] = {}
        self._jumps = setup is not None and setup.jumps
        self._width = -(-vocab_size // 32)
        # where masks say which bytes may come next
        self._lone: tuple[slice | np.ndarray, np.ndarray] | None = None
        self._guard = Guard[SlotGrammar]()
        self._compiled = None if setup is None else CompiledGrammars(setup)

    def prepare(self, grammar: Grammar | None, done: Callable[[], None] = lambda: None) -> None:
        """Starts to load the backend and to compile, in another thread; `admit` waits for what is not done.
        `done` is called, in some thread, when it waits no more for this grammar."""
        if self._compiled is None:
            return done()
        self._compiled.prepare(grammar, done)

    def admit(self, admit: Admit) -> None:
        """Forgets what the slot held. A sequence that comes back has its generated tokens with it."""
        self.slots.pop(admit.slot, None)
        constraint = admit.grammar_constraint
        if constraint is None or not self._samples or (constraint.grammar and self._compiled is None):
            return
        compiled = None
        if constraint.grammar is not None and self._compiled is not None:
            compiled = self._compiled.find(constraint.grammar)
        grammar = self.slots[admit.slot] = SlotGrammar(constraint, compiled, self._guard.enter)
        self._guarded(partial(grammar.begin, admit.prompt_len, admit.history[admit.prompt_len :].tolist()))

    def took(self, slots: list[int], tokens: list[int]) -> None:
        """The token that a step sampled for each of `slots`."""
        for slot, token in zip(slots, tokens, strict=True):
            if (grammar := self.slots.get(slot)) is not None:
                grammar.pending = token

    def accepted(self, slot: int, places: list[int], token: int) -> None:
        """A step with drafts came to the last of `places` (as in `masks`) and sampled `token` there."""
        if slot not in self.slots:
            return
        if places[-1] not in self._walked:  # its row has no drafts
            self.slots[slot].pending = token
            return
        grammar = self._walked[places[-1]]
        if grammar is None or any((walked := self._walked[at]) is None or walked.is_lost for at in places):
            self.slots[slot].is_lost = True
            return
        self.slots[slot] = grammar.slot = grammar
        grammar.pending = token

    def masks(
        self, slots: list[int], lengths: list[int], drafts: DraftRows | None = None
    ) -> tuple[list[int], np.ndarray]:
        """Places in `slots`, whose sequences are `lengths` tokens long, where the choice is not free, and
        int32 [places, ceil(V / 32)] with a bit for each token that they may take. Sets `runs`.

        With `drafts` a slot stands at several places, one for each node of its row.
        """
        if not self.slots:
            self.runs = {}
            return [], np.empty((0, self._width), np.int32)
        places, bits, self.runs = self._guarded(partial(self._masks, slots, lengths, drafts))
        return places, bits

    def _guarded(self, work: Callable[[], T]) -> T:
        """The result of work that can be done again from its beginning. A slot whose grammar does not get on
        is lost, and the work done again without it."""
        while True:
            try:
                return self._guard.run(work)
            except StuckError as stuck:
                stuck.culprit.is_lost = True

    def _masks(
        self, slots: list[int], lengths: list[int], drafts: DraftRows | None
    ) -> tuple[list[int], np.ndarray, dict[int, list[int]]]:
        """Places, masks and runs."""
        places, rows, lefts = [], list[SlotGrammar](), list[int]()  # lefts: tokens of a run that are to come
        walked = {} if drafts is None else self._walk(slots, lengths, drafts)
        for index, slot in enumerate(slots):
            if index in walked:
                grammar = walked[index]
            elif (grammar := self.slots.get(slot)) is not None:
                grammar.settle(lengths[index])
            if grammar is None:
                continue
            if grammar.length == lengths[index]:
                grammar.cut_reasoning()
            left = grammar.length - lengths[index]
            if grammar.is_masked or left > 0 or grammar.excluded:
                places.append(index)
                rows.append(grammar)
                lefts.append(left)
        bits = np.empty((len(rows), self._width), np.int32)
        if rows:
            self._fill(rows, lefts, bits)
            self._exclude(rows, lefts, bits)
            self._force(rows, lefts, bits)
            self._end(rows, lefts, bits)
        shortest = SHORTEST if len(rows) <= FEW else LONG
        runs = {
            places[row]: rows[row].run
            for row, left in enumerate(lefts)
            if self._jumps and left >= shortest and left == len(rows[row].run)
        }
        return places, bits, runs

    def _walk(self, slots: list[int], lengths: list[int], drafts: DraftRows) -> dict[int, SlotGrammar | None]:
        """By place, where the grammars of rows with drafts are at each node; None: at a node that its
        grammar does not allow, which is not accepted."""
        walked = self._walked = {}
        for row, (first, count) in enumerate(zip(drafts.first.tolist(), drafts.counts.tolist(), strict=True)):
            if (grammar := self.slots.get(slots[first])) is None:
                continue
            grammar.settle(lengths[first])
            walked[first] = grammar
            tokens, parents = drafts.tokens[row].tolist(), drafts.parents[row].tolist()
            for node in range(1, count):
                parent = walked[first + parents[node]]
                walked[first + node] = parent and parent.after(tokens[node], lengths[first + node])
        return walked

    def _fill(self, rows: list[SlotGrammar], lefts: list[int], bits: np.ndarray) -> None:
        """Bits of the tokens that may come next, but within runs. Takes the runs that begin here."""
        open_rows = [
            row
            for row, grammar in enumerate(rows)
            if grammar.is_masked and not (grammar.is_lost or lefts[row] > 0)
        ]
        if not open_rows:
            return
        assert self._compiled is not None
        is_all = len(open_rows) == len(rows)
        filled = bits if is_all else np.empty((len(open_rows), self._width), np.int32)
        for row, out in zip(open_rows, filled, strict=True):
            rows[row].fill(out)
        if not is_all:
            bits[open_rows] = filled
        if self._lone is None:
            self._lone = _lone_words(self._compiled.backend.byte_ids)
        words, ones = self._lone
        counts = np.bitwise_count(filled.view(np.uint32)[:, words] & ones).sum(axis=1).tolist()
        for row, count in zip(open_rows, counts, strict=True):
            if count < 2:
                lefts[row] = rows[row].look()

    def _exclude(self, rows: list[SlotGrammar], lefts: list[int], bits: np.ndarray) -> None:
        """Outside of runs, what would begin reasoning beyond its budget may not come."""
        for row, grammar in enumerate(rows):
            if grammar.thinking is None or lefts[row] > 0:
                continue
            if not grammar.is_masked:
                bits[row] = -1
            if excluded := grammar.excluded:
                words, ones = words_of(tuple(excluded))
                bits[row, words] &= ~ones

    def _force(self, rows: list[SlotGrammar], lefts: list[int], bits: np.ndarray) -> None:
        """Within a run its token alone may come."""
        if forced := [row for row, left in enumerate(lefts) if left > 0]:
            words, ones = split(tuple(rows[row].run[-lefts[row]] for row in forced))
            bits[forced] = 0
            bits[forced, words] = ones

    def _end(self, rows: list[SlotGrammar], lefts: list[int], bits: np.ndarray) -> None:
        """Where the text may end, all that can end it may come; a lost slot ends."""
        kinds: dict[tuple[int, ...], list[int]] = {}  # rows by what can end them
        for row, grammar in enumerate(rows):
            if grammar.is_lost:
                bits[row] = 0
                allow(bits, [row], grammar.grammar_constraint.stop_ids)
            elif len(grammar.grammar_constraint.stop_ids) > 1 and lefts[row] <= 0 and grammar.is_masked:
                kinds.setdefault(grammar.grammar_constraint.stop_ids, []).append(row)
        for stop_ids, alike in kinds.items():
            words, ones = split(stop_ids)
            ending = (bits[np.ix_(alike, words)] & ones).any(axis=1)
            if ending.any():
                allow(bits, np.array(alike)[ending], stop_ids)

    def unconstrained(self, slots: list[int]) -> list[int]:
        """Places in `slots` whose grammar could not be followed to here."""
        return [index for index, slot in enumerate(slots) if slot in self.slots and self.slots[slot].is_lost]


def split(ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The words of a mask that hold these tokens, and their bits in them."""
    tokens = np.array(ids, np.int64)
    return tokens >> 5, (1 << (tokens & 31)).astype(np.uint32).view(np.int32)


def words_of(ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The words of a mask that hold these tokens, each once, and the bits of all of them in it."""
    words, ones = split(ids)
    joined = np.zeros(int(words.max(initial=-1)) + 1, np.int32)
    np.bitwise_or.at(joined, words, ones)
    found = np.flatnonzero(joined)
    return found, joined[found]


def _lone_words(ids: tuple[int, ...]) -> tuple[slice | np.ndarray, np.ndarray]:
    """`words_of` with bits in uint32, and words that follow one another as a slice: it needs no copy."""
    words, ones = words_of(ids)
    first, last = (int(words[0]), int(words[-1])) if len(words) else (0, -1)
    return slice(first, last + 1) if last - first + 1 == len(words) else words, ones.view(np.uint32)


def allow(bits: np.ndarray, rows: Sequence[int] | np.ndarray, ids: tuple[int, ...]) -> None:
    """Sets the bits of these tokens in some rows of a mask, in place."""
    for word, one in zip(*split(ids), strict=True):
        bits[rows, word] |= one

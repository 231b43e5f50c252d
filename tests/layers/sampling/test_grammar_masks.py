"""Which tokens a slot with a grammar may take, with a backend that can be looked through: its texts are "aa"
after "b"."""

from threading import Event

import numpy as np
import pytest
import torch

from runtime.devices.cpu.ops import CpuOps
from runtime.grammar.backend import GrammarError
from runtime.grammar.open_backend import WithOthers
from runtime.layers.sampling import compiled_grammars
from runtime.layers.sampling.grammar_masks import GrammarMasks
from runtime.layers.sampling.sampler import BANNED, FAR
from runtime.messages.constraint import Grammar, GrammarSetup
from runtime.messages.requests import GrammarConstraint
from runtime.messages.steps import Admit
from tests.devices.drive import sampling

VOCAB = 70
SETUP = GrammarSetup(backend="counting", tokenizer_path="", vocab_size=VOCAB, eos_ids=(2,))


class Counting:
    """Backend, Compiled and Matcher in one: the tokens 5, 6, 7, ... in their order, `text` of them, then
    eos."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.count = 0

    def compile(self, grammar: Grammar) -> "Counting":
        if grammar.text == "bad":
            raise GrammarError("bad")
        return Counting(int(grammar.text))

    byte_ids = ()

    num_bytes = 1

    def fill(self, bits: np.ndarray) -> bool:
        return self._fill(bits)

    def matcher(self) -> "Counting":
        return Counting(self.total)

    def accept(self, token: int) -> bool:
        self.count += 1
        return token == 4 + self.count

    def jump_forward(self) -> list[int]:
        return []

    def _fill(self, bits: np.ndarray) -> bool:
        bits.fill(0)
        token = 2 if self.count == self.total else 5 + self.count
        bits[token // 32] |= 1 << (token % 32)
        return self.count <= 3


@pytest.fixture
def grammar_masks(monkeypatch: pytest.MonkeyPatch) -> GrammarMasks:
    monkeypatch.setattr(compiled_grammars, "open_backend", lambda setup: WithOthers(Counting()))
    return GrammarMasks(SETUP, VOCAB)


def admit(
    slot: int,
    text: str,
    after: tuple[tuple[int, ...], ...] = (),
    history: tuple[int, ...] = (),
    stops: tuple[int, ...] = (2, 69),
) -> Admit:
    return Admit(
        slot,
        sampling(),
        1,
        np.array((50, *history), np.int32),
        GrammarConstraint(Grammar("regex", text), after, stops),
    )


def allowed(grammar_masks: GrammarMasks, slot: int) -> set[int] | None:
    grammar = grammar_masks.slots.get(slot)
    places, bits = grammar_masks.masks(
        [slot], [0 if grammar is None else grammar.length + (grammar.pending is not None)]
    )
    return {i for i in range(VOCAB) if bits[0, i // 32] >> (i % 32) & 1} if places else None


def allowed_at(grammar_masks: GrammarMasks, slot: int, length: int) -> set[int]:
    _, bits = grammar_masks.masks([slot], [length])
    return {i for i in range(VOCAB) if bits[0, i // 32] >> (i % 32) & 1}


def test_a_slot_follows_its_tokens_and_ends(grammar_masks: GrammarMasks) -> None:
    grammar_masks.admit(admit(3, "2"))
    assert allowed(grammar_masks, 3) == {5} and allowed(grammar_masks, 4) is None
    grammar_masks.took([4, 3], [9, 5])
    assert allowed(grammar_masks, 3) == {6}
    grammar_masks.took([3], [6])
    assert allowed(grammar_masks, 3) == {2, 69}, "where it may end, each of its stop ids may come"
    grammar_masks.took([3], [69])
    assert allowed(grammar_masks, 3) is None, "the row of a sequence that has ended is free"
    grammar_masks.admit(Admit(3, sampling(), 1, np.array([50], np.int32)))
    assert not grammar_masks.slots


def test_a_sequence_that_comes_back_is_where_it_was(grammar_masks: GrammarMasks) -> None:
    grammar_masks.admit(admit(0, "3", history=(5, 6)))
    assert allowed(grammar_masks, 0) == {7}


def test_a_grammar_may_begin_later(grammar_masks: GrammarMasks) -> None:
    for slot, tokens in enumerate([(8, 8, 5, 8, 9), (7, 9, 7, 7)]):
        grammar_masks.admit(admit(slot, "1", after=((8, 9), (7, 9, 7, 7))))
        for token in tokens:
            assert allowed(grammar_masks, slot) is None
            grammar_masks.took([slot], [token])
        assert allowed(grammar_masks, slot) == {5}
    grammar_masks.admit(admit(1, "1", after=((8, 9),), history=(1, 8, 9, 5)))
    assert allowed(grammar_masks, 1) == {2, 69}


def test_a_forced_run_is_reported_once_and_holds_until_it_is_there(
    grammar_masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that were in flight go on with it, and a sequence that comes back within it does as well."""
    monkeypatch.setattr(
        Counting,
        "jump_forward",
        lambda self: list(range(5 + self.count, 4 + self.total)) if self.count < 2 else [],
    )
    monkeypatch.setattr(Counting, "_fill", lambda self, bits: bits.fill(-1) is None)
    grammar_masks.admit(admit(0, "7"))
    grammar_masks.admit(admit(1, "3"))
    grammar_masks.admit(admit(2, "7", history=(5, 6)))
    grammar_masks.admit(admit(3, "7", stops=(2, 7)))
    seen: list[tuple[int, dict[int, list[int]]]] = []
    for length, token in enumerate((5, 6, 7, 8, 9, 10, 30), 1):
        places, bits = grammar_masks.masks([9, 0], [5, length])
        assert places == [1]
        seen.append((int(np.bitwise_count(bits.view(np.uint32)).sum()), grammar_masks.runs))
        assert bits[0, token // 32] >> (token % 32) & 1
        grammar_masks.took([0], [token])
    assert seen == [(1, {1: [5, 6, 7, 8, 9, 10]}), *[(1, {})] * 5, (96, {})]
    assert allowed_at(grammar_masks, 1, 1) == {5} and grammar_masks.runs == {}, (
        "short runs are not worth telling"
    )
    assert allowed_at(grammar_masks, 2, 3) == {7} and grammar_masks.runs == {}
    assert allowed_at(grammar_masks, 3, 2) == {6} and len(grammar_masks.slots[3].run) == 2, (
        "what may end the text is not forced"
    )
    monkeypatch.setattr(Counting, "byte_ids", (33, 34))
    asked = GrammarMasks(SETUP, VOCAB)
    asked.admit(admit(0, "7", after=((5,),), history=(4,)))
    asked.took([0], [5])
    assert asked.masks([0], [3])[0] == [0] and not asked.slots[0].run, (
        "where two bytes may come, no one asks what is forced"
    )
    monkeypatch.setattr(Counting, "byte_ids", ())
    many = GrammarMasks(SETUP, VOCAB)
    for slot, text in enumerate(("7", "9", "9")):
        many.admit(admit(slot, text))
    many.masks([0, 1, 2], [1, 1, 1])
    assert many.runs == {1: list(range(5, 13)), 2: list(range(5, 13))}, (
        "among more sequences a run must be longer"
    )
    off = GrammarMasks(
        GrammarSetup(backend="counting", tokenizer_path="", vocab_size=VOCAB, eos_ids=(2,), jumps=False),
        VOCAB,
    )
    off.admit(admit(0, "7"))
    assert allowed_at(off, 0, 1) == {5} and off.runs == {}


def test_an_end_before_the_grammar_began_is_an_end(grammar_masks: GrammarMasks) -> None:
    grammar_masks.admit(admit(0, "1", after=(8,), history=(2, 8)))
    assert allowed(grammar_masks, 0) is None


@pytest.mark.parametrize("history", [(9,), (5, 6, 7, 8)], ids=["not accepted", "given up"])
def test_a_slot_that_is_lost_ends_and_is_named(grammar_masks: GrammarMasks, history: tuple[int, ...]) -> None:
    grammar_masks.admit(admit(0, "9", history=history))
    grammar_masks.admit(admit(1, "9"))
    assert allowed(grammar_masks, 0) == {2, 69} and grammar_masks.unconstrained([1, 0]) == [1]


def test_a_grammar_that_cannot_be_compiled_is_lost_at_once(grammar_masks: GrammarMasks) -> None:
    grammar_masks.admit(admit(0, "bad"))
    assert allowed(grammar_masks, 0) == {2, 69} and grammar_masks.unconstrained([0]) == [0]


def test_what_was_prepared_is_there(grammar_masks: GrammarMasks) -> None:
    grammar_masks.prepare(None)
    grammar_masks.prepare(Grammar("regex", "2"))
    grammar_masks.admit(admit(0, "2"))
    assert allowed(grammar_masks, 0) == {5}


def test_who_prepares_learns_when_a_step_waits_no_more(grammar_masks: GrammarMasks) -> None:
    done = Event()
    for text in ("2", "2", "bad"):  # compiled, known, not to be compiled
        done.clear()
        grammar_masks.prepare(Grammar("regex", text), done.set)
        assert done.wait(60) and grammar_masks._compiled._kept[Grammar("regex", text)].done()


def test_other_ranks_do_nothing() -> None:
    grammar_masks = GrammarMasks(None, VOCAB)
    grammar_masks.prepare(Grammar("regex", "1"))
    grammar_masks.admit(admit(0, "1"))
    assert not grammar_masks.slots


def test_masked_logits_lie_below_everything_else() -> None:
    """Also below the ban of stop ids, which gives way where a text can only end."""
    logits = torch.zeros(3, VOCAB)
    logits[1] = -2 * FAR
    bits = np.zeros((1, 3), np.int32)
    bits[0, 2] = 1 << 5 | 1
    bits[0, 0] = np.array(1 << 31, np.uint32).view(np.int32)
    CpuOps(torch.float32).mask(logits, torch.tensor([1]), torch.from_numpy(bits))
    assert (logits[1] > BANNED).nonzero().flatten().tolist() == [31, 64, 69]
    assert not logits[[0, 2]].any() and bool((logits[1, 31] > logits[1, 0]).item())

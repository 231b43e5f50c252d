"""Which tokens a slot with a grammar may take, with a backend that can be looked through: its texts are "aa" after "b"."""

from typing import Any

import numpy as np
import pytest
import torch

from runtime.constraint import Grammar, GrammarSetup
from runtime.devices.cpu.ops import CpuOps
from runtime.grammar.backend import GrammarError, fill_each
from runtime.layers import guides as guides_module
from runtime.layers.guides import Guides
from runtime.layers.sampler import BANNED, FAR
from runtime.messages import Admit
from runtime.request import Guide
from tests.devices.drive import sampling

VOCAB = 70
SETUP = GrammarSetup(backend="counting", tokenizer_path="", vocab_size=VOCAB, eos_ids=(2,))


class Counting:
    """Backend, Compiled and Matcher in one: the tokens 5, 6, 7, ... in their order, `text` of them, then eos."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.count = 0

    def compile(self, grammar: Grammar) -> "Counting":
        if grammar.text == "bad":
            raise GrammarError("bad")
        return Counting(int(grammar.text))

    def fill(self, bits: Any, given: np.ndarray | None = None) -> Any:
        return self._fill(bits) if given is None else fill_each(bits, given)

    def matcher(self) -> "Counting":
        return Counting(self.total)

    def accept(self, token: int) -> bool:
        self.count += 1
        return token == 4 + self.count

    def _fill(self, bits: np.ndarray) -> bool:
        bits.fill(0)
        token = 2 if self.count == self.total else 5 + self.count
        bits[token // 32] |= 1 << (token % 32)
        return self.count <= 3


@pytest.fixture
def guides(monkeypatch: pytest.MonkeyPatch) -> Guides:
    monkeypatch.setattr(guides_module, "open_backend", lambda setup: Counting())
    return Guides(SETUP, VOCAB)


def admit(slot: int, text: str, after: tuple[int, ...] = (), history: tuple[int, ...] = (), stops: tuple[int, ...] = (2, 69)) -> Admit:
    return Admit(slot, sampling(), 1, np.array((50, *history), np.int32), Guide(Grammar("regex", text), after, stops))


def allowed(guides: Guides, slot: int) -> set[int] | None:
    places, bits = guides.masks([slot])
    return {i for i in range(VOCAB) if bits[0, i // 32] >> (i % 32) & 1} if places else None


def test_a_slot_follows_its_tokens_and_ends(guides: Guides) -> None:
    guides.admit(admit(3, "2"))
    assert allowed(guides, 3) == {5} and allowed(guides, 4) is None
    guides.took([4, 3], [9, 5])
    assert allowed(guides, 3) == {6}
    guides.took([3], [6])
    assert allowed(guides, 3) == {2, 69}, "where it may end, each of its stop ids may come"
    guides.took([3], [69])
    assert allowed(guides, 3) is None, "the row of a sequence that has ended is free"
    guides.admit(Admit(3, sampling(), 1, np.array([50], np.int32)))
    assert not guides.slots


def test_a_sequence_that_comes_back_is_where_it_was(guides: Guides) -> None:
    guides.admit(admit(0, "3", history=(5, 6)))
    assert allowed(guides, 0) == {7}


def test_a_grammar_may_begin_later(guides: Guides) -> None:
    guides.admit(admit(0, "1", after=(8, 9)))
    for token in (8, 8, 5):
        assert allowed(guides, 0) is None
        guides.took([0], [token])
    for token in (8, 9):
        assert allowed(guides, 0) is None
        guides.took([0], [token])
    assert allowed(guides, 0) == {5}
    guides.admit(admit(1, "1", after=(8, 9), history=(1, 8, 9, 5)))
    assert allowed(guides, 1) == {2, 69}


def test_an_end_before_the_grammar_began_is_an_end(guides: Guides) -> None:
    guides.admit(admit(0, "1", after=(8,), history=(2, 8)))
    assert allowed(guides, 0) is None


@pytest.mark.parametrize("history", [(9,), (5, 6, 7, 8)], ids=["not accepted", "given up"])
def test_a_slot_that_is_lost_ends_and_is_named(guides: Guides, history: tuple[int, ...]) -> None:
    guides.admit(admit(0, "9", history=history))
    guides.admit(admit(1, "9"))
    assert allowed(guides, 0) == {2, 69} and guides.unguided([1, 0]) == [1]


def test_a_grammar_that_cannot_be_compiled_is_lost_at_once(guides: Guides) -> None:
    guides.admit(admit(0, "bad"))
    assert allowed(guides, 0) == {2, 69} and guides.unguided([0]) == [0]


def test_what_was_prepared_is_there(guides: Guides) -> None:
    guides.prepare(None)
    guides.prepare(Grammar("regex", "2"))
    guides.admit(admit(0, "2"))
    assert allowed(guides, 0) == {5}


def test_other_ranks_do_nothing() -> None:
    guides = Guides(None, VOCAB)
    guides.prepare(Grammar("regex", "1"))
    guides.admit(admit(0, "1"))
    assert not guides.slots


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

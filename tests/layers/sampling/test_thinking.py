"""Budgets of reasoning on the rank that samples: the end of the reasoning is forced when its budget is used
up."""

import numpy as np
import pytest

from runtime.layers.sampling.grammar_masks import GrammarMasks
from runtime.messages.constraint import Grammar
from runtime.messages.requests import GrammarConstraint, Thinking
from runtime.messages.steps import Admit
from tests.devices.drive import sampling
from tests.layers.sampling.test_grammar_masks import VOCAB, grammar_masks

__all__ = ["grammar_masks"]  # the fixture
BEGIN, END = (60, 61), (62, 63, 64)


def admit(
    thinking: Thinking,
    history: tuple[int, ...] = (),
    text: str | None = None,
    after: tuple[tuple[int, ...], ...] = (),
) -> Admit:
    grammar = None if text is None else Grammar("regex", text)
    return Admit(
        0,
        sampling(),
        1,
        np.array((50, *history), np.int32),
        GrammarConstraint(grammar, after, (2,), thinking),
    )


def allowed_at(masks: GrammarMasks, length: int) -> set[int] | None:
    places, bits = masks.masks([0], [length])
    return {i for i in range(VOCAB) if bits[0, i // 32] >> (i % 32) & 1} if places else None


def run(masks: GrammarMasks, one: Admit, count: int, first: tuple[int, ...] = (), free: int = 9) -> list[int]:
    """The tokens of a sequence that takes `first`, then `free`, where its choice is free."""
    masks.admit(one)
    taken: list[int] = []
    wanted_first = iter(first)
    for length in range(len(one.history), len(one.history) + count):
        may, wanted = allowed_at(masks, length), next(wanted_first, free)
        token = wanted if may is None or wanted in may else min(may)
        masks.took([0], [token])
        taken.append(token)
    return taken


@pytest.fixture
def plain() -> GrammarMasks:
    return GrammarMasks(None, VOCAB)


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_reasoning_that_the_prompt_opened_ends_at_its_budget(plain: GrammarMasks, budget: int) -> None:
    thinking = Thinking(budget, (BEGIN,), (END,), 0)
    assert run(plain, admit(thinking), budget + 6) == [9] * budget + [*END, 9, 9, 9]


def test_reasoning_that_the_model_opens_ends_at_its_budget(plain: GrammarMasks) -> None:
    thinking = Thinking(2, (BEGIN,), (END,), -1)
    assert run(plain, admit(thinking), 9, first=(7, *BEGIN)) == [7, *BEGIN, 9, 9, *END, 9]
    assert run(plain, admit(thinking), 8, first=(7, 7, 7, *BEGIN)) == [7, 7, 7, *BEGIN, 9, 9, 9], "content"


def test_reasoning_that_ends_by_itself_is_left_alone(plain: GrammarMasks) -> None:
    thinking = Thinking(5, (BEGIN,), (END,), 0)
    assert run(plain, admit(thinking), 12, first=(9, *END)) == [9, *END, *[9] * 8]


def test_an_end_that_has_begun_is_not_written_twice(plain: GrammarMasks) -> None:
    thinking = Thinking(3, (BEGIN,), (END,), 0)
    assert run(plain, admit(thinking), 7, first=(9, *END[:2])) == [9, *END, 9, 9, 9]


def test_reasoning_does_not_begin_again_when_its_budget_is_used_up(plain: GrammarMasks) -> None:
    thinking = Thinking(2, (BEGIN,), (END,), 0)
    plain.admit(admit(thinking, history=(9, 9, *END)))
    places, _ = plain.masks([0], [6])
    assert not places, "the marker's first token may begin other markers"
    plain.took([0], [BEGIN[0]])
    assert allowed_at(plain, 7) == set(range(VOCAB)) - {BEGIN[1]}
    one = Thinking(0, ((60,),), (END,), -1)
    plain.admit(admit(one))
    assert allowed_at(plain, 1) == set(range(VOCAB)) - {60}
    plain.admit(admit(one, history=(9, 9, 9)))
    assert allowed_at(plain, 4) is None, "in content it is text"


def test_reasoning_that_ended_by_itself_may_go_on_with_what_is_left(plain: GrammarMasks) -> None:
    thinking = Thinking(3, (BEGIN,), (END,), 0)
    # the end that the model wrote counts, but for its last token
    first = (9, END[0], END[1], END[2], 7, *BEGIN)
    assert run(plain, admit(Thinking(5, (BEGIN,), (END,), 0)), 12, first) == [*first, 9, 9, *END]
    assert run(plain, admit(thinking), 5, first[:4]) == [*first[:4], 9]


def test_channels_may_begin_reasoning_anywhere(plain: GrammarMasks) -> None:
    thinking = Thinking(1, (BEGIN,), (END,), -1, True)
    assert run(plain, admit(thinking), 8, first=(7, 7, 7, *BEGIN)) == [7, 7, 7, *BEGIN, 9, *END[:2]]
    plain.admit(admit(thinking, history=(*BEGIN, 9, *END, 9, 9, 9, 9, BEGIN[0])))
    assert allowed_at(plain, 12) == set(range(VOCAB)) - {BEGIN[1]}


def test_each_pair_of_markers_ends_with_its_own(plain: GrammarMasks) -> None:
    thinking = Thinking(1, (BEGIN, (55,)), (END, (56,)), -1)
    assert run(plain, admit(thinking), 4, first=(55,)) == [55, 9, 56, 9]
    assert run(plain, admit(Thinking(1, (BEGIN, (55,)), (END, (56,)), 1)), 3) == [9, 56, 9]


def test_a_grammar_holds_behind_the_forced_end(grammar_masks: GrammarMasks) -> None:
    thinking = Thinking(2, (BEGIN,), (END,), 0)
    one = admit(thinking, text="2", after=(END,))
    assert run(grammar_masks, one, 8) == [9, 9, *END, 5, 6, 2]


@pytest.mark.parametrize("known", range(8))
def test_a_sequence_that_comes_back_goes_on_as_if_it_had_not_left(
    grammar_masks: GrammarMasks, known: int
) -> None:
    """After a preemption, or the death of a rank."""
    thinking = Thinking(2, (BEGIN,), (END,), 0)
    whole = run(grammar_masks, admit(thinking, text="2", after=(END,)), 8)
    history = tuple(whole[:known])
    back = run(grammar_masks, admit(thinking, history, text="2", after=(END,)), 8 - known)
    assert [*history, *back] == whole


def test_ranks_that_do_not_sample_keep_no_budget() -> None:
    masks = GrammarMasks(None, VOCAB, samples=False)
    masks.admit(admit(Thinking(1, (BEGIN,), (END,), 0)))
    assert not masks.slots

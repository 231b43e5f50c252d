"""Allowed tokens and bad words against their definitions."""

from random import Random

import numpy as np
import pytest
import torch

from runtime.layers.sampling.penalties import LogitsPenalties
from runtime.layers.sampling.sampler import FAR
from runtime.layers.sampling.token_bans import BAD_WORD, NOT_ALLOWED, BadWords
from runtime.messages.requests import TokenBans
from runtime.messages.steps import Admit
from runtime.text.token_bans import NO_BITS, packed
from tests.devices.drive import sampling

PLACE = torch.device("cpu")
VOCAB = 21


def admit(
    slot: int,
    history: list[int],
    *,
    prompt_len: int = 0,
    allowed: tuple[int, ...] = (),
    words: tuple[tuple[int, ...], ...] = (),
    stop_ids: list[int] | None = None,
) -> Admit:
    bans = TokenBans(packed(allowed) if allowed else NO_BITS, words)
    params = sampling(token_bans=bans, stop_ids=stop_ids or [], min_len=100 if stop_ids else 0)
    return Admit(slot, params, prompt_len, np.array(history, np.int32))


def test_bad_words_against_their_definition() -> None:
    """A token is banned exactly where it would complete a word at the end of the answer."""
    random = Random(5)
    for _ in range(300):
        words = tuple(tuple(random.choices(range(4), k=random.randint(2, 4))) for _ in range(6))
        answer = random.choices(range(4), k=random.randint(0, 9))
        cut, drafted = random.randint(0, len(answer)), random.randint(0, 3)
        at = BadWords(words, answer[:cut])
        at.extend(answer[cut : cut + drafted])
        assert set(at.banned(answer[cut + drafted :])) == {
            word[-1] for word in words if answer[-len(word) + 1 :] == list(word[:-1])
        }


def test_only_allowed_tokens_are_left() -> None:
    penalties = LogitsPenalties(VOCAB, PLACE)
    penalties.admit(admit(0, [], allowed=(2, 20)))
    penalties.admit(admit(1, [], allowed=(0, 7)))
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    out = penalties.apply(logits, [1, 0, 3], [5, 5, 5])
    assert torch.equal(logits, before) and torch.equal(out[2], before[2])
    for row, allowed in ((0, (0, 7)), (1, (2, 20))):
        for token in range(VOCAB):
            wanted = before[row, token].item() if token in allowed else NOT_ALLOWED
            assert out[row, token].item() == pytest.approx(wanted)


def test_a_slot_forgets_what_it_excluded() -> None:
    penalties = LogitsPenalties(VOCAB, PLACE)
    penalties.admit(admit(0, [1, 5], prompt_len=1, allowed=(2,), words=((1,), (5, 6))))
    assert penalties.token_bans.words and penalties.apply(torch.zeros(1, VOCAB), [0], [9])[0, 1] < 0
    penalties.admit(Admit(0, sampling(), 0, np.empty(0, np.int32)))
    logits = torch.zeros(1, VOCAB)
    assert penalties.apply(logits, [0], [9]) is logits and not penalties.token_bans.words


def test_the_prompt_begins_no_bad_word_and_the_answer_does() -> None:
    penalties = LogitsPenalties(VOCAB, PLACE)
    penalties.admit(admit(0, [3, 4], prompt_len=2, words=((4, 5),)))
    penalties.admit(admit(1, [3, 4], prompt_len=1, words=((4, 5), (9,))))  # it was preempted behind a 4
    out = penalties.apply(torch.zeros(3, VOCAB), [0, 1, 1], [2, 2, 3], {2: [8]})
    assert not out[0].any()
    assert sorted(out[1].nonzero().flatten().tolist()) == [5, 9]
    assert out[2].nonzero().flatten().tolist() == [9], "a draft stands between"
    penalties.token_bans.took([0, 1], [[4], [1, 2]])
    out = penalties.apply(torch.zeros(2, VOCAB), [0, 1], [3, 4])
    assert out[0].nonzero().flatten().tolist() == [5] and out[1].nonzero().flatten().tolist() == [9]


def test_what_gives_way_where_nothing_is_left() -> None:
    """Allowed tokens hold where all of them are bad words, or end the answer too early; a grammar's bans are
    below all of it."""
    penalties = LogitsPenalties(VOCAB, PLACE)
    penalties.admit(admit(0, [], allowed=(6,), words=((6,),)))
    penalties.admit(admit(1, [], allowed=(2,), stop_ids=[2, 3]))
    out = penalties.apply(torch.zeros(2, VOCAB), [0, 1], [5, 5])
    assert out.argmax(dim=1).tolist() == [6, 2]
    assert BAD_WORD > NOT_ALLOWED > -4 * FAR and bool((out > -4 * FAR).all())

"""Penalties, biases and bans against their definitions."""

from typing import Any

import numpy as np
import pytest
import torch

from runtime.layers.sampling.captured_edits import BIASES, fits, has_edits
from runtime.layers.sampling.penalties import LogitsPenalties
from runtime.layers.sampling.sampler import FAR
from runtime.messages.steps import Admit
from runtime.ranks.sampling_needs import is_plain
from tests.devices.drive import sampling

PLACE = torch.device("cpu")
VOCAB = 12


def admit(slot: int, prompt: list[int], generated: list[int], **params: Any) -> Admit:
    return Admit(slot, sampling(**params), len(prompt), np.array(prompt + generated, dtype=np.int32))


def by_the_book(
    logits: list[float], prompt: list[int], generated: list[int], penalties: tuple[float, float, float]
) -> list[float]:
    frequency, presence, repetition = penalties
    out = list(logits)
    for token in set(prompt) | set(generated):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(generated):
        out[token] -= frequency * generated.count(token) + presence
    return out


@pytest.mark.parametrize("penalties", [(0.5, 0.0, 1.0), (0.0, 1.5, 1.0), (0.0, 0.0, 1.3), (-1.0, 0.5, 0.7)])
def test_penalties(penalties: tuple[float, float, float]) -> None:
    """From the history at admission, then token by token; the row beside it is left alone."""
    frequency, presence, repetition = penalties
    logits_penalties = LogitsPenalties(VOCAB, PLACE)
    prompt, generated = [1, 2, 2], [3, 3]
    logits_penalties.admit(
        admit(
            5,
            prompt,
            generated,
            frequency_penalty=frequency,
            presence_penalty=presence,
            repetition_penalty=repetition,
        )
    )
    logits_penalties.admit(admit(2, [], []))
    for token in (3, 7, 1):
        logits = torch.randn(2, VOCAB)
        before = logits.clone()
        out = logits_penalties.apply(logits, [2, 5], [9, 9])
        assert torch.equal(logits, before)
        assert torch.equal(out[0], logits[0])
        assert out[1].tolist() == pytest.approx(
            by_the_book(logits[1].tolist(), prompt, generated, penalties), abs=1e-5
        )
        logits_penalties.add([2, 5], torch.tensor([0, token]))
        generated.append(token)


def test_captured_steps_penalise_alike() -> None:
    """All rows at once, of slots that the device knows; and rows without penalties stay to the bit."""
    penalties = LogitsPenalties(VOCAB, PLACE)
    penalties.counts.reserve(3)
    held = penalties.counts.generated
    for slot in (2, 0):
        penalties.admit(admit(slot, [1, 2], [3], frequency_penalty=0.5, repetition_penalty=1.0 + slot))
    slots, counts = torch.tensor([0, 1, 2, 3]), penalties.counts
    for tokens in ([3, 5, 7, 0], [3, 5, 1, 0]):
        logits = torch.randn(4, VOCAB)
        found, expected = logits.clone(), penalties.apply(logits, [0, 1, 2], [9, 9, 9])
        counts.apply_captured(found, slots)
        assert torch.equal(found[:3], expected[:3]) and torch.equal(found[1::2], logits[1::2])
        counts.add_captured(slots, torch.tensor(tokens))
    assert counts.generated is held and held[counts.rows[2]].tolist() == [0, 1, 0, 1, 0, 0, 0, 1, *[0] * 4]
    penalties.admit(admit(2, [], []))
    assert counts.captured_rows is not None and counts.captured_rows.tolist() == [counts.rows[0], 0, 0, 0]


def test_captured_steps_edit_alike() -> None:
    """Biases and banned stop ids, with penalties and alone, to the bit; a slot forgets them."""
    penalties = LogitsPenalties(VOCAB, PLACE)
    penalties.reserve(4)
    penalties.admit(admit(0, [1], [3], bias_ids=[0, 3], bias_values=[5.0, -100.0], presence_penalty=0.5))
    penalties.admit(admit(1, [], [], stop_ids=[0, 2], min_len=10))
    penalties.admit(admit(2, [], [], bias_ids=[7], bias_values=[2.0], stop_ids=[7], min_len=5))
    slots = torch.tensor([0, 1, 1, 2, 2, 3, 4])
    lengths = torch.tensor([4, 9, 10, 4, 5, 1, 0])
    for _ in range(2):
        logits = torch.randn(7, VOCAB)
        found, expected = logits.clone(), penalties.apply(logits, slots.tolist(), lengths.tolist())
        penalties.apply_captured(found, slots, lengths)
        assert torch.equal(found, expected) and torch.equal(found[5:], logits[5:])
        assert found[1, 0] == found[3, 7] == pytest.approx(-2 * FAR)
    for slot in range(3):
        penalties.admit(admit(slot, [], []))
    found = logits.clone()
    penalties.apply_captured(found, slots, lengths)
    assert torch.equal(found, logits)


def test_what_tables_have_no_room_for() -> None:
    """Such sequences are sampled outside of captured steps."""
    many = list(range(BIASES + 1))
    for params, room in (
        ({"bias_ids": many, "bias_values": [1.0] * len(many)}, False),
        ({"bias_ids": many[1:], "bias_values": [1.0] * BIASES}, True),
        ({"stop_ids": many, "min_len": 4}, False),
        ({"stop_ids": many}, True),  # none is banned
    ):
        one = admit(0, [], [], **params)  # type: ignore[arg-type]
        assert fits(one.sampling) is room and is_plain(one) is room
        assert has_edits(one.sampling) is (params != {"stop_ids": many})


def test_counts_grow_and_are_reused() -> None:
    penalties = LogitsPenalties(VOCAB, PLACE)
    assert penalties.counts.generated.nbytes == 0
    for slot in range(9):
        penalties.admit(admit(slot, [slot], [slot, slot], presence_penalty=1.0))
    rows = len(penalties.counts.generated)
    assert 9 <= rows < 18
    for slot in range(9):
        penalties.admit(admit(slot, [], []))
    assert penalties.apply(torch.zeros(1, VOCAB), [3], [5]).sum() == 0
    penalties.admit(admit(4, [], [6], presence_penalty=1.0))
    out = penalties.apply(torch.zeros(1, VOCAB), [4], [5])[0]
    assert out.tolist() == [-1.0 if token == 6 else 0.0 for token in range(VOCAB)]
    assert len(penalties.counts.generated) == rows


def test_bias_and_bans() -> None:
    penalties = LogitsPenalties(VOCAB, PLACE)
    penalties.admit(admit(0, [], [], bias_ids=[1, 3], bias_values=[5.0, -1000.0]))
    penalties.admit(admit(1, [], [], stop_ids=[0, 2], min_len=10))
    out = penalties.apply(torch.zeros(3, VOCAB), [0, 1, 1], [4, 9, 10])
    assert out[0, [0, 1, 3]].tolist() == [0.0, 5.0, -1000.0]
    assert out[1, [0, 1, 2]].tolist() == [pytest.approx(-2 * FAR), 0.0, pytest.approx(-2 * FAR)]
    assert out[2].tolist() == [0.0] * VOCAB


def test_extreme_penalty_stays_finite() -> None:
    penalties = LogitsPenalties(VOCAB, PLACE)
    penalties.admit(admit(0, list(range(VOCAB)), [], repetition_penalty=1e-30))
    out = penalties.apply(torch.tensor([[FAR, -FAR] + [1e20] * (VOCAB - 2)]), [0], [1])
    assert out.isfinite().all()


def test_nothing_to_do_costs_no_copy() -> None:
    penalties = LogitsPenalties(VOCAB, PLACE)
    penalties.admit(admit(0, [1], []))
    logits = torch.zeros(1, VOCAB)
    assert penalties.apply(logits, [0], [1]) is logits

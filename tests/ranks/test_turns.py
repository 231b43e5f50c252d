"""Computations that take turns, and steps that are cut in two for them."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.state_rows import StateRows
from runtime.ranks.turns import Turns
from runtime.ranks.two_batches import cut_rows, cut_states, num_first, num_whole_rows


def counting(name: str, count: int, turns: Turns[str], done: list[str]) -> Callable[[], str]:
    """Passes the turn on `count` times."""

    def compute() -> str:
        for i in range(count):
            done.append(f"{name}{i}")
            turns.pass_on()
        done.append(f"{name} ends")
        return name

    return compute


@pytest.mark.parametrize(
    ("counts", "order"),
    [
        ((2, 2), ["a0", "b0", "a1", "b1", "a ends", "b ends"]),
        ((0, 2), ["a ends", "b0", "b1", "b ends"]),
        ((3, 1), ["a0", "b0", "a1", "b ends", "a2", "a ends"]),
    ],
)
def test_one_runs_at_a_time(counts: tuple[int, int], order: list[str]) -> None:
    turns, done = Turns[str](), list[str]()
    first, second = (counting(name, n, turns, done) for name, n in zip("ab", counts, strict=True))
    assert turns.run(first, second) == ("a", "b")
    assert done == order


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_ends_both(failing: int) -> None:
    turns, done = Turns[str](), list[str]()

    def fail() -> str:
        turns.pass_on()
        raise ValueError("broken")

    pair = [counting("a", 9, turns, done), counting("a", 9, turns, done)]
    pair[failing] = fail
    with pytest.raises(ValueError, match="broken"):
        turns.run(*pair)
    assert "a ends" not in done and len(done) <= 2


@pytest.mark.parametrize(
    ("counts", "threshold", "first"),
    [
        ([1, 1, 1, 1], 0.48, 2),
        ([1, 1, 1], 0.48, 1),
        ([1], 0.48, 0),
        ([1], 0.0, 0),
        ([40], 0.48, 20),  # one prompt: its second half is a chunk of its own
        ([40], 0.0, 0),
        ([10, 30], 0.48, 20),
        ([10, 30], 0.2, 10),
        ([10, 30], 0.0, 10),
        ([1, 1, 20, 22], 0.48, 22),
        ([50, 1, 1], 0.0, 50),
    ],
)
def test_where_a_step_is_cut(counts: list[int], threshold: float, first: int) -> None:
    assert num_first(np.array(counts, np.int32), threshold) == first


@pytest.mark.parametrize(
    ("first", "whole", "halves"),
    [
        (1, 3, (1, 2)),
        (2, 3, (2, 1)),
        (7, 3, (3, 1)),
        (12, 3, (3, 0)),
        (13, 3, (3, 0)),
        (12, 4, (3, 1)),
        (1, 0, (0, 0)),
    ],
)
def test_whole_rows_of_each_part(first: int, whole: int, halves: tuple[int, int]) -> None:
    """Rows of 1, 1, 10 and 9 tokens."""
    counts = np.array([1, 1, 10, 9], np.int32)
    rows = AttentionRows(2, np.arange(4, dtype=np.int32), np.zeros(4, np.int64), counts)
    assert num_whole_rows(rows, whole, first) == halves


@pytest.mark.parametrize("first", [1, 2, 3, 7, 12, 13, 20])
def test_states_go_on_where_a_row_is_cut(first: int) -> None:
    """Two rows that decode, then rows of 10 and 9 tokens, in state slots 3, 0, 2 and 1."""
    states = StateRows([], torch.tensor([3, 0]), ((2, 2, 10), (1, 12, 9)))
    tokens = [(3, 0), (0, 0), *((2, i) for i in range(10)), *((1, i) for i in range(9))]
    found: list[tuple[int, int]] = []
    done: Counter[int] = Counter()
    for part in cut_states(states, first):
        at = len(part.decodes)
        found += [(slot, 0) for slot in part.decodes.tolist()]
        for slot, begin, count in part.extends:
            assert begin == at and count > 0
            found += [(slot, done[slot] + i) for i in range(count)]
            done[slot], at = done[slot] + count, at + count
    assert found == tokens


@pytest.mark.parametrize("first", [1, 2, 3, 7, 12, 13, 20])
def test_every_token_is_in_one_part(first: int) -> None:
    counts, starts = np.array([1, 1, 10, 9], np.int32), np.array([5, 8, 0, 16], np.int64)
    rows = AttentionRows(2, np.array([3, 0, 2, 1], np.int32), starts, counts)
    tokens = [
        (slot, position)
        for slot, start, count in zip(rows.slots, starts, counts, strict=True)
        for position in range(start, start + count)
    ]
    found = []
    for part in cut_rows(rows, first):
        assert (part.counts > 0).all() and (part.counts[: part.num_decodes] == 1).all()
        found.append(
            [
                (slot, position)
                for slot, start, count in zip(part.slots, part.starts, part.counts, strict=True)
                for position in range(start, start + count)
            ]
        )
    assert found == [tokens[:first], tokens[first:]]
    assert sum(part.num_decodes for part in cut_rows(rows, first)) == 2
    assert counts.tolist() == [1, 1, 10, 9] and starts.tolist() == [5, 8, 0, 16], "the plan's own"

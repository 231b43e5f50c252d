"""Grids found in positions are the positions that ranks make of them."""

import numpy as np
import pytest

from runtime.messages.media import TokenGrid
from runtime.ranks.token_grids import put_positions
from runtime.text.position_grids import grids_of


def positions_of(grids: tuple[TokenGrid, ...], count: int) -> np.ndarray:
    """[3, count], as a rank makes them."""
    numbers = [
        [one.offset, one.frames, one.rows, one.columns, 1, one.back, one.time, one.advance] for one in grids
    ]
    places = np.arange(count)
    found = np.repeat(places[:, None], 3, axis=1)
    put_positions(found, places, np.array(numbers, np.float64).reshape(-1, 8))
    return found.T


def grid(begin: int, rows: int, columns: int, time: int = 0) -> np.ndarray:
    """Positions of one frame."""
    row, column = np.divmod(np.arange(rows * columns), columns)
    return np.stack([np.full(rows * columns, begin + time), begin + row, begin + column])


def text(begin: int, count: int) -> np.ndarray:
    return np.repeat(np.arange(begin, begin + count)[None], 3, axis=0)


@pytest.mark.parametrize(
    ("parts", "behind", "count"),
    [
        ([text(0, 5)], 5, 0),
        ([grid(0, 3, 4)], 4, 1),
        ([grid(0, 1, 1)], 1, 0),
        ([grid(0, 1, 1)], 3, 1),
        ([grid(0, 4, 1)], 4, 1),
        ([grid(0, 1, 4)], 4, 1),
        ([text(0, 2), grid(2, 3, 2), text(5, 3)], 8, 1),
        ([text(0, 2), grid(2, 2, 2), text(4, 1), grid(5, 2, 3), text(8, 1)], 9, 2),
        ([grid(0, 2, 2), grid(2, 2, 2)], 4, 2),
        ([grid(0, 2, 2), grid(0, 2, 2, time=5)], 6, 2),
    ],
)
def test_positions_are_kept(parts: list[np.ndarray], behind: int, count: int) -> None:
    positions = np.concatenate(parts, axis=1)
    found = grids_of(positions, behind)
    assert len(found) == count
    tokens = positions.shape[1]
    made = positions_of(found, tokens + 1)
    assert (made[:, :tokens] == positions).all()
    assert (made[:, tokens] == behind).all()


@pytest.mark.parametrize(
    "positions", [np.array([[0, 1], [0, 1], [0, 3]]), np.array([[1], [1], [1]]), np.zeros((4, 2), np.int64)]
)
def test_other_positions_are_refused(positions: np.ndarray) -> None:
    with pytest.raises(ValueError, match="no grids"):
        grids_of(positions, 5)

"""Rotary positions of three numbers a token as grids of frames, rows and columns (M-RoPE): what a model's own
code computes for the tokens of a file, in the form that the ranks take (ranks/token_grids.py)."""

import numpy as np

from runtime.messages.media import TokenGrid


def grids_of(positions: np.ndarray, behind: int) -> tuple[TokenGrid, ...]:
    """The grids of a file's tokens. `positions`: int64 [3, tokens], of frame, row and column, from the
    position that a text would go on at; `behind`: the position of what follows. Tokens that have positions as
    a text are in no grid. Raises ValueError for positions that are in none either."""
    count = positions.shape[1]
    if positions.shape[0] != 3 or (count and positions[1, 0]) or (positions[1] != positions[2])[:1].any():
        raise ValueError("its positions are no grids of frames, rows and columns")
    begins = [*positions[1].tolist(), behind]
    found: list[TokenGrid] = []
    at = 0
    while at < count:
        rows, columns = _shape_at(positions[:, at:])
        begin, following = begins[at], begins[at + rows * columns]
        time = int(positions[0, at]) - begin
        if rows * columns > 1 or time or following != begin + 1:
            found.append(TokenGrid(at, 1, rows, columns, time=time, advance=following - begin))
        at += rows * columns
        if at < count and positions[1, at] != positions[2, at]:
            raise ValueError("its positions are no grids of frames, rows and columns")
    return tuple(found)


def _shape_at(positions: np.ndarray) -> tuple[int, int]:
    """Rows and columns of the largest grid of one frame that begins with the first of these tokens."""
    first = positions[:, :1]
    along = np.arange(positions.shape[1])
    columns = _leading(
        (positions[0] == first[0]) & (positions[1] == first[1]) & (positions[2] == first[2] + along)
    )
    lines = positions[:, : positions.shape[1] // columns * columns].reshape(3, -1, columns)
    number, column = np.arange(lines.shape[1])[:, None], np.arange(columns)
    is_line = (lines[0] == first[0]) & (lines[1] == first[1] + number) & (lines[2] == first[2] + column)
    return _leading(is_line.all(axis=1)), columns


def _leading(true: np.ndarray) -> int:
    """How many values before the first false one."""
    return len(true) if true.all() else int(true.argmin())

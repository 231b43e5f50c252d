"""The tokens of a prompt that stand for a video whose moments have their times between them, as text
(Qwen3-VL, GLM-4.1V)."""

from collections.abc import Callable, Sequence
from math import floor

import numpy as np
from msgspec import Struct

from runtime.messages.media import TokenGrid
from runtime.models.config.encoder_parts import MomentMarks


class TokenLayout(Struct, frozen=True):
    """Tokens that stand for a file: fields of Prepared."""

    token_ids: list[int]
    positions: np.ndarray
    token_grids: tuple[TokenGrid, ...]


def one_grid(placeholder_id: int, grid: tuple[int, int, int]) -> TokenLayout:
    """Tokens in one grid of frames, rows and columns, with nothing between them."""
    count = grid[0] * grid[1] * grid[2]
    return TokenLayout([placeholder_id] * count, np.arange(count, dtype=np.int32), (TokenGrid(0, *grid),))


def moments_apart(
    grid: tuple[int, int, int],
    times_s: Sequence[float],
    marks: MomentMarks,
    encode: Callable[[str], list[int]],
) -> TokenLayout:
    """Each moment in a grid of its own, between its marks, with its time. `times_s`: of each moment, in
    seconds; `encode`: makes tokens of text, of each time by itself."""
    size = grid[1] * grid[2]
    ids: list[int] = []
    grids: list[TokenGrid] = []
    for time_s in times_s:
        text = encode(marks.form.format(time_s))
        ids += [*text, marks.start_id] if marks.time_first else [marks.start_id]
        grids.append(TokenGrid(len(ids), 1, grid[1], grid[2]))
        ids += [marks.row_id] * size
        ids += [marks.end_id] if marks.time_first else [marks.end_id, *text]
    starts = np.array([one.offset for one in grids], np.int32)
    positions = (starts[:, None] + np.arange(size, dtype=np.int32)).ravel()
    return TokenLayout(ids, positions, tuple(grids))


def moment_times(frame_times_s: Sequence[float], depth: int, marks: MomentMarks) -> list[float]:
    """The time that a prompt names for each moment of `depth` frames, in seconds. The last frame is repeated
    up to a whole moment."""
    times = [*frame_times_s, *[frame_times_s[-1]] * (-len(frame_times_s) % depth)]
    firsts, lasts = times[::depth], times[depth - 1 :: depth]
    if marks.time_first:
        return [(first + last) / 2 for first, last in zip(firsts, lasts, strict=True)]
    return [floor(first) for first in firsts]

"""Rotary positions of tokens that stand in grids of frames, rows and columns (M-RoPE, layers/rotary.py).

A token's place in its sequence says where its key is; what it is rotated by is another number behind an
image, and three numbers within one. They follow from the place and the grids before it, which a slot knows
from its admission on: so chunks, cached prefixes and decodes need nothing else.
"""

import numpy as np
import torch
from torch import Tensor

from runtime.layers.upload import upload_int64

NUMBERS = 8  # of a grid: place of the first token, frames, rows, columns, step, back, time, advance


class TokenGrids:
    """The grids of each slot."""

    def __init__(self, num_slots: int, torch_device: torch.device) -> None:
        self._grids: dict[
            int, np.ndarray
        ] = {}  # of slots that have some: float64 [grids, NUMBERS], as Admit.grids
        self._shifts = np.zeros(num_slots, np.int64)  # what is added to places behind all grids
        self._torch_device = torch_device
        self._reserved: Tensor | None = None

    @property
    def has_any(self) -> bool:
        """Whether some slot has grids."""
        return bool(self._grids)

    def reserve(self) -> Tensor:
        """What is added to places behind all grids, int64 [slots], kept up to date on the device: for
        captured steps."""
        if self._reserved is None:
            self._reserved = upload_int64(self._shifts, self._torch_device)
        return self._reserved

    def admit(self, slot: int, grids: np.ndarray) -> None:
        """A sequence with these grids, `Admit.grids`, takes the slot."""
        if not len(grids) and slot not in self._grids:
            return
        self._grids.pop(slot, None)
        if len(grids):
            self._grids[slot] = grids.reshape(-1, NUMBERS)
        self._shifts[slot] = sum(shift_of(numbers) for numbers in grids.reshape(-1, NUMBERS).tolist())
        if self._reserved is not None:
            self._reserved[slot] = int(self._shifts[slot])

    def shifted(self, slots: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Positions of tokens behind all grids of their slots, int64 [T], from their places."""
        return places + self._shifts[slots] if self._grids else places

    def positions(self, slots: np.ndarray, counts: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Positions of a step's tokens from their places, int64 [T], of which each slot has `counts` in
        turn: int64 [T], or [T, 3] where some are in a grid."""
        found = np.repeat(places[:, None], 3, axis=1)
        begin = 0
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            if slot in self._grids:
                put_positions(found[begin : begin + count], places[begin : begin + count], self._grids[slot])
            begin += count
        return found if (found != found[:, :1]).any() else found[:, 0].copy()


def put_positions(positions: np.ndarray, places: np.ndarray, grids: np.ndarray) -> None:
    """Makes positions, int64 [n, 3], of places, int64 [n], and the grids of their sequence."""
    for numbers in grids.tolist():
        first, frames, rows, columns = map(int, numbers[:4])
        size, step, back, time = frames * rows * columns, numbers[4], int(numbers[5]), int(numbers[6])
        inside = (places >= first) & (places < first + size)
        offsets = places[inside] - first
        within = np.stack(np.unravel_index(offsets, (frames, rows, columns)), axis=1)
        within[:, 0] = frame_positions(within[:, 0], step) + time
        positions[inside] += within - back
        positions[inside] -= offsets[:, None]
        positions[places >= first + size] += shift_of(numbers)


def frame_positions(frames: np.ndarray, step: float) -> np.ndarray:
    """Positions of frames, int64 [n], from the first one: cut to whole numbers, as in transformers."""
    return (frames.astype(np.float32) * np.float32(step)).astype(np.int64)


def shift_of(numbers: list[float]) -> int:
    """What is added to places behind a grid, as Admit.grids has its numbers: text goes on behind the greatest
    position in it (Wang et al., 2024, 2.1), if the grid does not say where."""
    _, frames, rows, columns, step, back, time, advance = numbers
    last = int(frame_positions(np.array([frames - 1]), step)[0]) + time
    behind = max(last + 1, rows, columns) - back if advance < 0 else advance
    return int(behind - frames * rows * columns)

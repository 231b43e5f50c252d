"""Rotary positions of tokens that stand in grids of frames, rows and columns (M-RoPE, layers/rotary.py).

A token's place in its sequence says where its key is; what it is rotated by is another number behind an
image, and three numbers within one. They follow from the place and the grids before it, which a slot knows
from its admission on: so chunks, cached prefixes and decodes need nothing else.
"""

import numpy as np
import torch
from torch import Tensor

from runtime.layers.upload import upload_int64


class TokenGrids:
    """The grids of each slot."""

    def __init__(self, num_slots: int, torch_device: torch.device) -> None:
        self._grids: dict[int, np.ndarray] = {}  # of slots that have some: int32 [grids, 4], as Admit.grids
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
            self._grids[slot] = grids.reshape(-1, 4)
        counts, sides = grids.reshape(-1, 4)[:, 1:].prod(axis=1), grids.reshape(-1, 4)[:, 2:].max(axis=1)
        self._shifts[slot] = (sides - counts).sum()
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
    for first, frames, rows, columns in grids.tolist():
        size = frames * rows * columns
        inside = (places >= first) & (places < first + size)
        offsets = places[inside] - first
        positions[inside] += np.stack(np.unravel_index(offsets, (frames, rows, columns)), axis=1)
        positions[inside] -= offsets[:, None]
        positions[places >= first + size] += max(rows, columns) - size

"""Learned positions of patches in images of any size: a square table of vectors, between which is
interpolated."""

from collections.abc import Callable

import numpy as np

KEYS = -0.75  # the parameter of cubic interpolation (Keys, 1981) that torch has


def linear_taps(places: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Entries of a table's axis of `side` for places on an axis of `size` patches, int64 [L]: those between
    which each lies, int64 [L, 2], and their weights, float32 [L, 2]. First and last patches are at the
    table's ends."""
    at = places.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    return _taps(at, side, np.arange(2), lambda distance: np.maximum(1 - distance, 0))


def cubic_taps(places: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """As `linear_taps`, of the four entries around each: [L, 4]. Middles of the axes' parts correspond, and
    beyond the table's ends is what is at them."""
    at = (places.astype(np.float32) + np.float32(0.5)) * np.float32(side) / np.float32(size) - np.float32(0.5)
    return _taps(at, side, np.arange(-1, 3), _cubic)


def _cubic(distance: np.ndarray) -> np.ndarray:
    near = ((KEYS + 2) * distance - (KEYS + 3)) * distance * distance + 1
    far = ((KEYS * distance - 5 * KEYS) * distance + 8 * KEYS) * distance - 4 * KEYS
    return np.where(distance <= 1, near, far)


def _taps(
    at: np.ndarray, side: int, offsets: np.ndarray, weigh: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    entries = np.floor(at).astype(np.int64)[:, None] + offsets
    weights = weigh(np.abs(at[:, None] - entries.astype(np.float32)))
    return entries.clip(0, side - 1), weights.astype(np.float32)


def table_entries(
    rows: tuple[np.ndarray, np.ndarray], columns: tuple[np.ndarray, np.ndarray], side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Taps of patches by row and by column, [L, n] each, as entries of the flat table and their weights:
    int64 and float32 [L, n * n]."""
    entries = rows[0][:, :, None] * side + columns[0][:, None, :]
    weights = rows[1][:, :, None] * columns[1][:, None, :]
    return entries.reshape(len(entries), -1), weights.reshape(len(weights), -1)

"""Chunk sizes that take the same time: the deeper in a prompt, the smaller (`--enable-dynamic-chunking`).

A token attends to all before it, so equal chunks of a long prompt take longer and longer, and streams that
share their steps slow down. The time of a step is modelled as a sum of four terms, fitted to the times that
the ranks report.
"""

from math import sqrt

import numpy as np
from msgspec import Struct

FORGET = 0.99  # weight of older steps, at each new one
MIN_STEPS = 8  # with extend rows, before the fit counts for anything
SMALLEST = 8  # a chunk is never less than this part of a full one


class Work(Struct, frozen=True):
    """What a step computes: decode rows, known tokens, and those times the positions that each attends to."""

    decodes: int
    tokens: int
    attended: int


class Chunking:
    """Fits `compute_s = a + b decodes + c tokens + d attended` by least squares, older steps counting
    less."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._squares = np.eye(4) * 1e-9
        self._products = np.zeros(4)
        self._steps = 0
        self._fit: tuple[float, float] | None = (0.0, 0.0)  # c and d; None: to be fitted

    def learn(self, work: Work, compute_s: float) -> None:
        """A step of this work took `compute_s` seconds."""
        features = np.array([1.0, work.decodes, work.tokens, work.attended]) / (1, 64, 1024, 1e6)
        self._squares = self._squares * FORGET + np.outer(features, features)
        self._products = self._products * FORGET + features * compute_s
        self._steps += 1
        self._fit = None

    def size(self, start: int, full: int) -> int:
        """Tokens from position `start` that take as long as `full` tokens from the beginning of a prompt."""
        if self._fit is None:
            solved = np.linalg.solve(self._squares + np.eye(4) * 1e-9, self._products)
            self._fit = max(float(solved[2]) / 1024, 0.0), max(float(solved[3]) / 1e6, 0.0)
        token_s, attended_s = self._fit
        if self._steps < MIN_STEPS or attended_s == 0.0 or start == 0:
            return full
        budget_s = token_s * full + attended_s * full * full / 2
        slope = token_s + attended_s * start  # attended_s/2 n² + slope n = budget_s
        size = int((sqrt(slope * slope + 2 * attended_s * budget_s) - slope) / attended_s)
        whole_pages = size // self.page_size * self.page_size
        return min(full, max(whole_pages, full // SMALLEST, 1))

"""Rows of different lengths in one line."""

import numpy as np


class Ragged:
    """`V` rows of `counts` items each, row after row: of each item its row, and its place in the row."""

    def __init__(self, counts: np.ndarray) -> None:
        begins = counts.cumsum() - counts
        self.row = np.repeat(np.arange(len(counts)), counts)
        self.column = np.arange(len(self.row)) - begins[self.row]

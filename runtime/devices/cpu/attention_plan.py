"""What the cpu device knows of a step's rows: as the kernels read them, and for attention in torch."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.layers.attention import sdpa


@dataclass(frozen=True)
class CpuAttentionPlan:
    """The rows of one step, and where their pages are."""

    rows: AttentionRows
    page_tables: Tensor  # int32 [pools, max_slots, pages]
    page_size: int
    windows: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def gathered(self) -> sdpa.AttentionPlan:
        """The plan of attention in torch (layers/attention/sdpa.py), made when a layer first asks for it."""
        return sdpa.plan_attention(self.rows, self.page_tables, self.page_size, self.windows, self.dtype)

    @cached_property
    def row_arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots int32 [R], starts int64 [R] and counts int32 [R], each in one piece of memory."""
        rows = self.rows
        return (
            np.ascontiguousarray(rows.slots, np.int32),
            np.ascontiguousarray(rows.starts, np.int64),
            np.ascontiguousarray(rows.counts, np.int32),
        )

    @property
    def is_plain(self) -> bool:
        """Whether the kernels attend to these rows: none is a tree of drafts, or has strides or spans."""
        return not self.rows.parents and self.rows.strides is None and not self.rows.spans

    @property
    def longest(self) -> int:
        """Tokens of the longest row's slot, with those of this step."""
        return int(self.rows.ends.max())

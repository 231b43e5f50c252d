"""Page tables and lengths of rows for kernels of other packages, from the first page on that a row sees.

The columns of a page table before a sliding window may hold anything, so they are left out; positions within
what is left follow from its end.
"""

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.layers.upload import upload, upload_int64


def kv_ranges(
    starts: np.ndarray, counts: np.ndarray, page_size: int, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first page that each row sees and the number of keys from there on, int64 [R] each. `window` 0: no
    sliding window."""
    first = (
        np.maximum(starts.astype(np.int64) - window + 1, 0) // page_size
        if window
        else np.zeros(len(starts), np.int64)
    )
    return first, starts + counts - first * page_size


def page_table_of(
    plan: AttentionRows, page_table: Tensor, page_size: int, window: int
) -> tuple[Tensor, Tensor]:
    """Pages int32 [R, width] and the number of keys in them [R]. Columns behind a row's last page are not
    read."""
    first, lengths = kv_ranges(plan.starts, plan.counts, page_size, window)
    columns = np.minimum(
        first[:, None] + np.arange(-(-int(lengths.max()) // page_size)), page_table.shape[1] - 1
    )
    torch_device = page_table.device
    return page_table[
        upload_int64(plan.slots, torch_device).unsqueeze(1), upload_int64(columns, torch_device)
    ], upload(lengths.astype(np.int32), torch_device)


def decode_page_table(
    slots: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, window: int
) -> tuple[Tensor, Tensor]:
    """Key ranges of captured decode rows, from tensors alone (int64 [R]): as wide as the longest row may
    need."""
    if not window:
        return page_table[slots], lengths.int()
    first = (lengths - window).clamp_min(0) // page_size
    width = min(page_table.shape[1], -(-window // page_size) + 1)
    columns = (first.unsqueeze(1) + torch.arange(width, device=slots.device)).clamp_max(
        page_table.shape[1] - 1
    )
    return page_table[slots.unsqueeze(1), columns], (lengths - first * page_size).int()

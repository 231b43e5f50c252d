"""What kernels that take page tables and lengths want to know of rows: pages from the first one on that a row
sees.

A page table's columns before a window may hold anything, so they are left out; a row's position in what is
left follows from its end.
"""

import numpy as np
import torch
from torch import Tensor

from runtime.layers.upload import upload, upload_int64
from runtime.messages.steps import StepPlan


def kv_ranges(
    starts: np.ndarray, counts: np.ndarray, page_size: int, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of each row the first page, and the number of keys from there on; int64."""
    first = (
        np.maximum(starts.astype(np.int64) - window + 1, 0) // page_size
        if window
        else np.zeros(len(starts), np.int64)
    )
    return first, starts + counts - first * page_size


def page_table_of(plan: StepPlan, page_table: Tensor, page_size: int, window: int) -> tuple[Tensor, Tensor]:
    """int32 [R, width] and [R]: pages, and keys in them. Columns behind a row's last page repeat what is
    there; they are not read."""
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
    """The same in captured bodies: as wide as any length may want, from tensors alone (int64 [R])."""
    if not window:
        return page_table[slots], lengths.int()
    first = (lengths - window).clamp_min(0) // page_size
    width = min(page_table.shape[1], -(-window // page_size) + 1)
    columns = (first.unsqueeze(1) + torch.arange(width, device=slots.device)).clamp_max(
        page_table.shape[1] - 1
    )
    return page_table[slots.unsqueeze(1), columns], (lengths - first * page_size).int()

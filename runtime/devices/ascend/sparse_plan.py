"""What sparse latent attention reads of a step's rows: tensors of the device alone, so a captured step needs
nothing from the host."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.layers.upload import upload, upload_int64


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """The rows of a step, whatever their numbers of queries."""

    page_size: int
    ends: Tensor  # int32 [R]: end of each row's queries among those of the step
    lengths: Tensor  # int32 [R]: keys that the last query of each row sees
    table: Tensor  # int32 [R, pages]


def plan_sparse(plan: AttentionRows, page_table: Tensor, page_size: int) -> SparsePlan:
    """The plan of a step; see Ops.plan_attention. Rows whose queries have others between them become a row
    for each query."""
    torch_device = page_table.device
    starts, counts, slots = plan.starts.astype(np.int64), plan.counts.astype(np.int64), plan.slots
    if plan.strides is not None and (plan.strides != 1).any():
        nth = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        starts = np.repeat(starts, counts) + nth * np.repeat(plan.strides, counts)
        slots, counts = np.repeat(slots, counts), np.ones_like(starts)
    lengths = (starts + counts).astype(np.int32)
    width = -(-int(lengths.max()) // page_size)
    rows = page_table.index_select(0, upload_int64(slots, torch_device))
    ends = counts.cumsum(dtype=np.int32)
    return SparsePlan(
        page_size, upload(ends, torch_device), upload(lengths, torch_device), rows[:, :width].contiguous()
    )


def plan_sparse_decodes(slots: Tensor, lengths: Tensor, page_table: Tensor, page_size: int) -> SparsePlan:
    """The plan of captured decode rows, which see all of their page table; see Graphs.plan_decodes."""
    ends = torch.arange(1, len(slots) + 1, dtype=torch.int32, device=slots.device)
    return SparsePlan(page_size, ends, lengths.int(), page_table.index_select(0, slots))

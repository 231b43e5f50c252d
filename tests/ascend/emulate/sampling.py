"""Filtering of logits."""

import math

import torch
from torch import Tensor

from tests.ascend.emulate.norms import FLOATS
from tests.ascend.emulate.table import need, need_dtype, need_shape, need_values, operator


@operator("npu::npu_top_k_top_p")
def top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Logits with -inf for those outside. Of equal logits at the k-th place all stay; the sum of the smallest
    is cut at 1 - p."""
    need(logits.dim() == 2, f"logits are 2-D, not {logits.dim()}-D")
    need_dtype("logits", logits, *FLOATS)
    need(p is not None or k is not None, "p or k must be given")
    rows, size = logits.shape
    ordered, order = logits.sort(dim=-1, stable=True)
    values = ordered.float()
    if k is not None:
        need_dtype("k", k, torch.int32)
        need_shape("k", k, rows)
        need_values(
            lambda: ((k >= 1) & (k <= min(1024, size))).all(), f"k lies outside 1 .. {min(1024, size)}"
        )
        limit = values.gather(-1, (size - k.long().clamp(1, size))[:, None])
        values = values.masked_fill(values < limit, -math.inf)
    if p is not None:
        need(p.dtype == logits.dtype, f"p is {p.dtype}, logits {logits.dtype}")
        need_shape("p", p, rows)
        need_values(lambda: ((p >= 0) & (p <= 1)).all(), "p lies outside 0 .. 1")
        cut = values.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None]
        cut[:, -1] = False
        values = values.masked_fill(cut, -math.inf)
    return torch.empty_like(values).scatter_(-1, order, values).to(logits.dtype)

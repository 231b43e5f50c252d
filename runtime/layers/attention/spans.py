"""Attention of steps with rows in which tokens see each other both ways: those rows by torch over gathered
pages (sdpa.py), and the others by the device's own kernels, which are causal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.base import AttentionPlan
from runtime.layers.attention import sdpa
from runtime.layers.upload import upload_int64


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """How the rows of a step are attended, whose queries are listed by the step's."""

    both_ways: sdpa.AttentionPlan
    queries: Tensor  # int64: of the rows with spans
    own: AttentionPlan | None  # of the other rows; None: there are none
    own_queries: Tensor  # int64


def plan_spans(
    rows: AttentionRows,
    page_tables: Tensor,
    page_size: int,
    windows: tuple[int, ...],
    dtype: torch.dtype,
    plan_own: Callable[[AttentionRows, Tensor, int, tuple[int, ...]], AttentionPlan],
) -> SpanPlan:
    """The plan of a step with spans. `plan_own`: as Ops.plan_attention, of rows without; the rest as
    there."""
    has_span = np.isin(np.arange(len(rows.slots)), list(rows.spans or {}))
    queries = np.repeat(has_span, rows.counts)
    some = [np.flatnonzero(has_span), np.flatnonzero(~has_span)]
    both_ways = _selected(rows, some[0], 0)
    own = _selected(rows, some[1], rows.num_decodes) if len(some[1]) else None
    torch_device = page_tables.device
    return SpanPlan(
        sdpa.plan_attention(both_ways, page_tables, page_size, windows, dtype),
        upload_int64(np.flatnonzero(queries), torch_device),
        None if own is None else plan_own(own, page_tables, page_size, windows),
        upload_int64(np.flatnonzero(~queries), torch_device),
    )


def _selected(rows: AttentionRows, indices: np.ndarray, num_decodes: int) -> AttentionRows:
    """Some rows of a step, of which the first `num_decodes` decode."""
    assert rows.strides is None, "strides do not go with spans"
    slots, starts, counts = (part[indices] for part in (rows.slots, rows.starts, rows.counts))
    parents, spans = (
        {place: given[row] for place, row in enumerate(indices.tolist()) if row in given}
        for given in (rows.parents or {}, rows.spans or {})
    )
    return AttentionRows(num_decodes, slots, starts, counts, parents or None, spans=spans or None)


def attend_spans(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: SpanPlan,
    scores: Scores,
    attend_own: Callable[[Tensor, Tensor, Tensor, Any, Scores], Tensor],
) -> Tensor:
    """Attention of a step, q [T, H, D] -> [T, H, D]. `attend_own`: as Ops.attention."""
    found = sdpa.attend(q[plan.queries], k_cache, v_cache, plan.both_ways, scores)
    if plan.own is None:
        return found
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out[plan.queries] = found
    out[plan.own_queries] = attend_own(q[plan.own_queries].contiguous(), k_cache, v_cache, plan.own, scores)
    return out

"""Prompts by torch's scaled_dot_product_attention, cuDNN first: `--prefill-attention-backend cudnn`.

Keys and values of a row are gathered from its pages, and what torch takes of them is one call: causal where
nothing stands before the row's queries, with a mask where a prefix does. cuDNN chooses by shape whether it
computes it; torch takes flash attention otherwise. Layers with windows, score caps, sinks or biases are
computed by our own kernel over the same rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda import attention as paged
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.kv_ranges import page_table_of
from runtime.layers.attention.sdpa import read_as

ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True, slots=True)
class CudnnRow:
    """A row of the step."""

    queries: slice
    locations: Tensor  # int64 [L] in the caches: the keys that its last query sees
    mask: Tensor | None  # bool [n, L], which keys each query sees; None: its keys are its queries' own


@dataclass(frozen=True, slots=True)
class CudnnPlan:
    """The rows of a step's prompts, also as our own kernel sees them."""

    rows: tuple[CudnnRow, ...]
    paged: paged.AttentionPlan


class CudnnBackend:
    """See AttentionBackend; for prompts alone."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        self.gpu = gpu

    def plan(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> CudnnPlan:
        """Where the keys of these rows are."""
        table, _ = page_table_of(plan, page_tables[0], page_size, 0)
        inside = torch.arange(page_size, device=table.device)
        rows, first = [], 0
        for pages, start, count in zip(table, plan.starts.tolist(), plan.counts.tolist(), strict=True):
            end = start + count
            used = pages[: -(-end // page_size)].long()
            locations = (used.unsqueeze(1) * page_size + inside).flatten()[:end]
            mask = None
            if start:
                mask = torch.ones(count, end, dtype=torch.bool, device=table.device).tril(start)
            rows.append(CudnnRow(slice(first, first + count), locations, mask))
            first += count
        return CudnnPlan(tuple(rows), paged.plan_attention(plan, page_tables, page_size))

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> CudnnPlan:
        """Not supported."""
        raise AssertionError("cudnn computes prompts alone")

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, metadata: CudnnPlan, scores: Scores) -> Tensor:
        """Attention of these rows' queries."""
        if scores.window or scores.cap or scores.sinks is not None or scores.slopes is not None:
            return paged.attention(q, keys, values, metadata.paged, scores, self.gpu)
        out = q.new_empty(*q.shape[:2], values.shape[2])
        with sdpa_kernel(ORDER, set_priority=True):
            for row in metadata.rows:
                parts = (read_as(cache, row.locations, q.dtype) for cache in (keys, values))
                found = scaled_dot_product_attention(
                    *(x.transpose(0, 1).unsqueeze(0) for x in (q[row.queries], *parts)),
                    attn_mask=row.mask,
                    is_causal=row.mask is None,
                    scale=scores.scale,
                    enable_gqa=q.shape[1] != keys.shape[1],
                )
                out[row.queries] = found.squeeze(0).transpose(0, 1)
        return out

    def replan(self, metadata: CudnnPlan, lengths: np.ndarray) -> None:
        """Not supported."""
        raise AssertionError("cudnn computes prompts alone")

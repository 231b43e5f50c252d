"""Prompts by cuDNN: `--prefill-attention-backend cudnn`.

With the package nvidia-cudnn-frontend cuDNN reads keys and values from their pages (cudnn_pages.py).
Without it, for pages of 8 bits, and for what cuDNN has no kernel for over pages, keys and values of a row
are gathered, and torch's scaled_dot_product_attention has cuDNN's kernels first: causal where nothing
stands before the row's queries, with a mask where a prefix does. Layers with windows, score caps, sinks or
biases are computed by our own kernel over the same rows. (cuDNN reads pages of 8 bits with queries in 8
bits alone, and before Blackwell its results are in 8 bits as well.)

Prompts of latent attention (MLA) that are expanded to keys and values of all heads attend likewise; short
ones are absorbed, which is our own kernel's.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda import attention as paged
from runtime.devices.cuda.cudnn_pages import PagedRows, open_paged_sdpa
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.kv_ranges import page_table_of
from runtime.devices.cuda.mla import EXPANDED_PAGE, UpProjection, mla_attention
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


@dataclass(slots=True)
class CudnnPlan:
    """The rows of a step's prompts, also as our own kernel sees them."""

    plan: AttentionRows
    page_tables: Tensor
    page_size: int
    paged: paged.AttentionPlan
    pages: PagedRows | None  # as cuDNN reads them over pages; None: they are gathered
    rows: list[CudnnRow] = field(default_factory=list)  # made when a layer first gathers them

    def gathered(self) -> list[CudnnRow]:
        """Where the keys of these rows are."""
        if not self.rows:
            table, _ = page_table_of(self.plan, self.page_tables[0], self.page_size, 0)
            inside, first = torch.arange(self.page_size, device=table.device), 0
            starts, counts = self.plan.starts.tolist(), self.plan.counts.tolist()
            for pages, start, count in zip(table, starts, counts, strict=True):
                used = pages[: -(-(start + count) // self.page_size)].long()
                locations = (used.unsqueeze(1) * self.page_size + inside).flatten()[: start + count]
                mask = mask_behind(start, count, table.device)
                self.rows.append(CudnnRow(slice(first, first + count), locations, mask))
                first += count
        return self.rows


def mask_behind(start: int, count: int, torch_device: torch.device) -> Tensor | None:
    """Which of start + count keys each of the last `count` tokens sees, bool; None: nothing stands before
    them, and torch says causal."""
    if not start:
        return None
    return torch.ones(count, start + count, dtype=torch.bool, device=torch_device).tril(start)


def attend_gathered(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [n, H, DK] over keys [L, K, DK] and values [L, K, DV] -> [n, H, DV]."""
    with sdpa_kernel(ORDER, set_priority=True):
        found = scaled_dot_product_attention(
            *(x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values)),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != keys.shape[1],
        )
    return found.squeeze(0).transpose(0, 1)


class CudnnBackend:
    """See AttentionBackend; for prompts alone."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        self.gpu = gpu
        self.sdpa = open_paged_sdpa(dtype)

    def plan(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> CudnnPlan:
        """Where the keys of these rows are."""
        own = paged.plan_attention(plan, page_tables, page_size)
        pages = None if self.sdpa is None else PagedRows.of(plan, page_tables, page_size)
        return CudnnPlan(plan, page_tables, page_size, own, pages)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> CudnnPlan:
        """Not supported."""
        raise AssertionError("cudnn computes prompts alone")

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, metadata: CudnnPlan, scores: Scores) -> Tensor:
        """Attention of these rows' queries."""
        if scores.window or scores.cap or scores.sinks is not None or scores.slopes is not None:
            return paged.attention(q, keys, values, metadata.paged, scores, self.gpu)
        if self.sdpa is not None and metadata.pages is not None and keys.dtype == q.dtype:
            pages = (cache.unflatten(0, (-1, metadata.page_size)) for cache in (keys, values))
            found = self.sdpa.attend(q, *pages, metadata.pages, scores.scale)
            if found is not None:
                return found
        out = q.new_empty(*q.shape[:2], values.shape[2])
        for row in metadata.gathered():
            parts = (read_as(cache, row.locations, q.dtype) for cache in (keys, values))
            out[row.queries] = attend_gathered(q[row.queries], *parts, row.mask, scores.scale)
        return out

    def attend_latents(
        self,
        q: Tensor,
        q_rope: Tensor,
        latents: Tensor,
        ropes: Tensor,
        up: UpProjection,
        metadata: CudnnPlan,
        scale: float,
    ) -> Tensor:
        """Latent attention of these rows' queries, see Ops.latent_attention."""
        return mla_attention(
            q, q_rope, latents, ropes, up, metadata.paged, scale, self.gpu, attend=self.attend_expanded
        )

    def attend_expanded(self, q: Tensor, keys: Tensor, values: Tensor, length: int, scale: float) -> Tensor:
        """A row's last queries [n, H, DK] over its keys and values; see mla.AttendExpanded."""
        start = length - len(q)
        if self.sdpa is not None:
            num_pages = len(keys) // EXPANDED_PAGE
            own = np.zeros(1, np.int32), np.array([start]), np.array([len(q)], np.int32)
            table = torch.arange(num_pages, dtype=torch.int32, device=q.device).view(1, 1, -1)
            rows = PagedRows.of(AttentionRows(0, *own), table, EXPANDED_PAGE)
            pages = (x.unflatten(0, (num_pages, EXPANDED_PAGE)) for x in (keys, values))
            found = self.sdpa.attend(q, *pages, rows, scale)
            if found is not None:
                return found
        mask = mask_behind(start, len(q), q.device)
        return attend_gathered(q, keys[:length], values[:length], mask, scale)

    def replan(self, metadata: CudnnPlan, lengths: np.ndarray) -> None:
        """Not supported."""
        raise AssertionError("cudnn computes prompts alone")

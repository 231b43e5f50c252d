"""Prompts by cuDNN: `--prefill-attention-backend cudnn`.

With the package nvidia-cudnn-frontend cuDNN reads keys and values from their pages (cudnn_pages.py).
Without it, for pages of 8 bits, and for what cuDNN has no kernel for over pages, keys and values of a row
are gathered, and torch's scaled_dot_product_attention has cuDNN's kernels first: causal where nothing
stands before the row's queries, with a mask where a prefix does. Layers with windows, score caps, sinks or
biases are computed by our own kernel over the same rows. (cuDNN reads pages of 8 bits with queries in 8
bits alone, and before Blackwell its results are in 8 bits as well.)

Prompts of latent attention (MLA) that are expanded to keys and values of all heads attend likewise; short
ones are absorbed, which is our own kernel's.

cuDNN's graphs are built for a number of pages too, so the steps that are taken before a server has its pages
only show which kinds of layers there are, and gather. When it has them, all graphs are built that steps may
need.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from runtime import log
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda import attention as paged
from runtime.devices.cuda.cudnn_pages import GraphSizes, Kind, PagedRows, Shape, holds, open_paged_sdpa
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.kv_ranges import page_table_of
from runtime.devices.cuda.mla import EXPANDED_PAGE, UpProjection, expanded_heads, expanded_room, mla_attention
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
    calls: list[PagedRows]  # as cuDNN reads them over pages
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


class PagedLayers(NamedTuple):
    """Layers whose keys and values are in pages."""

    heads: int  # of queries
    keys: tuple[int, ...]  # numbers of a token: K, D
    values: tuple[int, ...]
    page_size: int
    scale: float


class ExpandedLayers(NamedTuple):
    """Layers of latent attention, whose prompts are expanded."""

    heads: int
    dims: tuple[int, int]  # of keys and values
    longest: tuple[int, ...]  # sizes of rows that are expanded
    scale: float


class CudnnBackend:
    """See AttentionBackend; for prompts alone."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu, sizes: GraphSizes) -> None:
        self.dtype, self.gpu, self.sizes = dtype, gpu, sizes
        self.sdpa = open_paged_sdpa(dtype)
        self.has_pages = False
        self.layers: set[PagedLayers | ExpandedLayers] = set()  # that steps had before there were pages

    def take_pages(self, caches: Sequence[tuple[Tensor, ...]]) -> None:
        """The caches of all layers, which a server keeps: builds the graphs of the layers seen so far."""
        self.has_pages = True
        if self.sdpa is None:
            return
        begin_s = perf_counter()
        wanted = {one for layers in self.layers for one in self._graphs_of(layers, caches)}
        found = [self.sdpa.graph_of(*one) for one in sorted(wanted)]
        if found:
            num, took_s = sum(graph is not None for graph in found), round(perf_counter() - begin_s, 1)
            log.get("ranks").info("graphs of cuDNN are built", graphs=num, of=len(found), seconds=took_s)

    def _graphs_of(
        self, layers: PagedLayers | ExpandedLayers, caches: Sequence[tuple[Tensor, ...]]
    ) -> Iterator[tuple[Kind, Shape]]:
        if isinstance(layers, ExpandedLayers):
            for num_pages, heads in self._expanded_sizes(layers):
                keys, values = (
                    torch.empty(num_pages, EXPANDED_PAGE, heads, dim, dtype=self.dtype, device="meta")
                    for dim in layers.dims
                )
                kind = Kind.of(heads, keys, values, layers.scale)
                for longest in layers.longest:
                    if holds(longest, num_pages * EXPANDED_PAGE):
                        yield kind, Shape(1, longest, num_pages)
            return
        for pair in caches:
            if tuple(tuple(cache.shape[1:]) for cache in pair) == (layers.keys, layers.values):
                pages = (cache.unflatten(0, (-1, layers.page_size)) for cache in pair)
                kind = Kind.of(layers.heads, *pages, layers.scale)
                yield from ((kind, shape) for shape in self.sizes.shapes(layers.page_size))

    def _expanded_sizes(self, layers: ExpandedLayers) -> Iterator[tuple[int, int]]:
        """Pages, and heads at once, that rows are expanded to."""
        room = 0
        while room < self.sizes.most_keys:
            room = expanded_room(room + 1)
            step = expanded_heads(sum(layers.dims), room)
            for heads in {min(step, layers.heads), layers.heads % step} - {0}:
                yield room // EXPANDED_PAGE, heads

    def plan(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> CudnnPlan:
        """Where the keys of these rows are."""
        own = paged.plan_attention(plan, page_tables, page_size)
        has_graphs = self.sdpa is not None and self.has_pages
        calls = PagedRows.of(plan, page_tables, page_size, self.sizes) if has_graphs else []
        return CudnnPlan(plan, page_tables, page_size, own, calls)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> CudnnPlan:
        """Not supported."""
        raise AssertionError("cudnn computes prompts alone")

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, metadata: CudnnPlan, scores: Scores) -> Tensor:
        """Attention of these rows' queries."""
        if scores.window or scores.cap or scores.sinks is not None or scores.slopes is not None:
            return paged.attention(q, keys, values, metadata.paged, scores, self.gpu)
        if keys.dtype == q.dtype and not self.has_pages:
            dims, page_size = (tuple(cache.shape[1:]) for cache in (keys, values)), metadata.page_size
            self.layers.add(PagedLayers(q.shape[1], *dims, page_size, scores.scale))
        elif keys.dtype == q.dtype and self.sdpa is not None:
            pages = (cache.unflatten(0, (-1, metadata.page_size)) for cache in (keys, values))
            found = self.sdpa.attend(q, *pages, metadata.calls, scores.scale)
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
        if not self.has_pages:
            dims = q.shape[2] + q_rope.shape[2], up.values.shape[2]
            longest = (size for size in self.sizes.all_longest() if not up.absorbs(size))
            self.layers.add(ExpandedLayers(q.shape[1], dims, tuple(longest), scale))
        return mla_attention(
            q, q_rope, latents, ropes, up, metadata.paged, scale, self.gpu, attend=self.attend_expanded
        )

    def attend_expanded(self, q: Tensor, keys: Tensor, values: Tensor, length: int, scale: float) -> Tensor:
        """A row's last queries [n, H, DK] over its keys and values; see mla.AttendExpanded."""
        start, count = length - len(q), len(q)
        if self.sdpa is not None and self.has_pages:
            num_pages = len(keys) // EXPANDED_PAGE
            table = torch.arange(num_pages, dtype=torch.int32, device=q.device).unsqueeze(0)
            shape = Shape(1, self.sizes.longest(count), num_pages)
            rows = PagedRows.padded(slice(0, count), shape, table, np.array([start]), np.array([count]))
            pages = (x.unflatten(0, (num_pages, EXPANDED_PAGE)) for x in (keys, values))
            found = self.sdpa.attend(q, *pages, [rows], scale)
            if found is not None:
                return found
        mask = mask_behind(start, count, q.device)
        return attend_gathered(q, keys[:length], values[:length], mask, scale)

    def replan(self, metadata: CudnnPlan, lengths: np.ndarray) -> None:
        """Not supported."""
        raise AssertionError("cudnn computes prompts alone")

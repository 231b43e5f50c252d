"""FlashInfer over pages (Ye et al., 2025): `--attention-backend flashinfer`, the package flashinfer-python.

Its kernels follow a schedule that the wrapper's `plan` makes on the host from the rows' lengths, once a step
for each kind of layer. In a captured step the schedule is in buffers that are written again before each
replay; the pages of rows, which the host does not know, are listed by the graph itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.attention_backends import apply_sinks
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.kv_ranges import decode_page_table, kv_ranges
from runtime.layers.upload import upload_int64

WORKSPACE_BYTES = 256 << 20  # for parts of rows whose keys are split; its documents recommend half of that
GROUP = 4  # query heads of a key head from which tensor cores pay in decodes


@dataclass(frozen=True, slots=True)
class WrapperKey:
    """What a schedule depends on besides rows: layers with equal keys share a wrapper."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    window: int
    cap: float
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @classmethod
    def of(cls, q: Tensor, keys: Tensor, scores: Scores) -> "WrapperKey":
        """The key of a layer with these queries, cache and scores."""
        return cls(
            q.shape[1],
            keys.shape[1],
            q.shape[2],
            scores.scale,
            scores.window,
            scores.cap,
            q.dtype,
            keys.dtype,
        )


@dataclass(frozen=True, slots=True)
class PageIndices:
    """The pages of the rows of a phase, as the layers of one window see them."""

    ends: np.ndarray  # int32 [R + 1]: where each row's pages begin
    last: np.ndarray  # int32 [R]: tokens in its last page
    ids: Tensor  # int32 on the device: the pages; in a captured step as many as there may be


@dataclass(slots=True)
class FlashInferPlan:
    """The plan of a step; or, where it is captured, of all steps with this number of rows."""

    page_size: int
    pages: dict[int, PageIndices]  # window -> pages
    queries: np.ndarray | None  # int32 [R + 1]: where each row's queries begin; None: one each
    is_captured: bool = False
    wrappers: dict[WrapperKey, "PlannedWrapper"] = field(default_factory=dict)


class Wrapper(Protocol):
    """What FlashInfer's wrappers for decode and prefill have in common."""

    def plan(self, *args: object, **options: object) -> None:
        """Makes the schedule of the next runs."""
        ...

    def run(
        self, q: Tensor, caches: tuple[Tensor, ...], *, return_lse: bool
    ) -> "Tensor | tuple[Tensor, Tensor]":
        """Attention output, and with `return_lse` the binary log-sum-exp."""
        ...


class PlannedWrapper:
    """One of FlashInfer's wrappers, which keeps the schedule of a kind of layers."""

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        # recorded when the latest schedule has left the pinned memory that the next one is made in
        self.plan_copied: torch.cuda.Event | None = None

    def plan(self, key: WrapperKey, pages: PageIndices, queries: np.ndarray | None, page_size: int) -> None:
        """Makes the schedule for these rows."""
        if self.plan_copied is not None:
            self.plan_copied.synchronize()
        ends, last = torch.from_numpy(pages.ends), torch.from_numpy(pages.last)
        options = {
            "sm_scale": key.scale,
            "window_left": key.window - 1 if key.window else -1,
            "logits_soft_cap": key.cap,
            "q_data_type": key.dtype,
            "kv_data_type": key.kv_dtype,
        }
        ids = pages.ids[: int(pages.ends[-1])]
        rows = (ends, ids, last, key.heads, key.kv_heads, key.dim, page_size)
        if queries is None:
            self.wrapper.plan(*rows, **options)
        else:
            self.wrapper.plan(torch.from_numpy(queries), *rows, causal=True, **options)
        if ids.is_cuda:
            self.plan_copied = torch.cuda.Event()
            self.plan_copied.record()


class FlashInferBackend:
    """FlashInfer's wrappers over pages; see AttentionBackend."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        self.decode: Callable[..., Wrapper] = BatchDecodeWithPagedKVCacheWrapper
        self.prefill: Callable[..., Wrapper] = BatchPrefillWithPagedKVCacheWrapper
        self.workspace: Tensor | None = None
        # (key, whether rows decode) -> wrapper of steps that are not captured
        self.eager_wrappers: dict[tuple[WrapperKey, bool], PlannedWrapper] = {}
        # number of rows, and windows of the layers -> plan
        self.captured_plans: dict[tuple[int, tuple[int, ...]], FlashInferPlan] = {}

    def plan(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> FlashInferPlan:
        """Pages of these rows, for each window."""
        queries = None if plan.num_decodes else np.concatenate(([0], plan.counts.cumsum())).astype(np.int32)
        pages = {
            window: page_indices(plan, page_tables[-1 if window else 0], page_size, window)
            for window in windows
        }
        return FlashInferPlan(page_size, pages, queries)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> FlashInferPlan:
        """The plan of captured decode rows: the same buffers for each number of rows, in the warm-up and in
        the capture."""
        num = len(slots)
        tables = {
            window: decode_page_table(slots, lengths, page_tables[-1 if window else 0], page_size, window)
            for window in windows
        }
        key = num, windows
        if key not in self.captured_plans:
            # rows of padding, one token each
            single = np.arange(num + 1, dtype=np.int32), np.ones(num, np.int32)
            self.captured_plans[key] = FlashInferPlan(
                page_size,
                {
                    window: PageIndices(
                        *single, torch.zeros(table.numel(), dtype=torch.int32, device=table.device)
                    )
                    for window, (table, _) in tables.items()
                },
                None,
                is_captured=True,
            )
        metadata = self.captured_plans[key]
        for window, (table, keys) in tables.items():
            flatten_pages(table, keys, page_size, metadata.pages[window].ids)
        return metadata

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, metadata: FlashInferPlan, scores: Scores
    ) -> Tensor:
        """Attention of these rows' queries."""
        key = WrapperKey.of(q, keys, scores)
        if key not in metadata.wrappers:
            pages, is_decode = metadata.pages[scores.window], metadata.queries is None
            wrapper = (
                self.captured_wrapper(key, pages)
                if metadata.is_captured
                else self.eager_wrapper(key, q.device, is_decode)
            )
            wrapper.plan(key, pages, metadata.queries, metadata.page_size)
            metadata.wrappers[key] = wrapper
        caches = tuple(cache.unflatten(0, (-1, metadata.page_size)) for cache in (keys, values))
        result = metadata.wrappers[key].wrapper.run(
            q.contiguous(), caches, return_lse=scores.sinks is not None
        )
        if scores.sinks is None:
            return result
        out, lse = result  # binary logarithms
        return apply_sinks(out, lse * math.log(2), scores.sinks)

    def replan(self, metadata: FlashInferPlan, lengths: np.ndarray) -> None:
        """Makes the schedules of the next replay."""
        for key, wrapper in metadata.wrappers.items():
            kv_lengths = lengths.astype(np.int64)
            _, keys = kv_ranges(kv_lengths - 1, np.ones_like(kv_lengths), metadata.page_size, key.window)
            ends, last = page_counts(keys, metadata.page_size)
            wrapper.plan(
                key, PageIndices(ends, last, metadata.pages[key.window].ids), None, metadata.page_size
            )

    def workspace_buffer(self, torch_device: torch.device) -> Tensor:
        """The workspace that all wrappers share, allocated at the first call."""
        if self.workspace is None:
            self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=torch_device)
        return self.workspace

    def eager_wrapper(self, key: WrapperKey, torch_device: torch.device, is_decode: bool) -> PlannedWrapper:
        """The wrapper of steps that are not captured, which run one after the other on the device."""
        entry = key, is_decode
        if entry not in self.eager_wrappers:
            workspace_buffer = self.workspace_buffer(torch_device)
            self.eager_wrappers[entry] = PlannedWrapper(
                self.decode(workspace_buffer, "NHD", use_tensor_cores=key.heads >= GROUP * key.kv_heads)
                if is_decode
                else self.prefill(workspace_buffer, "NHD")
            )
        return self.eager_wrappers[entry]

    def captured_wrapper(self, key: WrapperKey, pages: PageIndices) -> PlannedWrapper:
        """A wrapper of captured steps, with buffers of its own."""
        torch_device = pages.ids.device
        return PlannedWrapper(
            self.decode(
                self.workspace_buffer(torch_device),
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=key.heads >= GROUP * key.kv_heads,
                paged_kv_indptr_buffer=torch.zeros(len(pages.ends), dtype=torch.int32, device=torch_device),
                paged_kv_indices_buffer=pages.ids,
                paged_kv_last_page_len_buffer=torch.ones(
                    len(pages.last), dtype=torch.int32, device=torch_device
                ),
            )
        )


def page_counts(keys: np.ndarray, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """For rows with `keys` [R] keys: where the pages of each begin, int32 [R + 1], and the number of keys in
    its last page, int32 [R]."""
    counts = -(-keys // page_size)
    return np.concatenate(([0], counts.cumsum())).astype(np.int32), (keys - (counts - 1) * page_size).astype(
        np.int32
    )


def page_indices(plan: AttentionRows, page_table: Tensor, page_size: int, window: int) -> PageIndices:
    """The pages that these rows see."""
    first, keys = kv_ranges(plan.starts, plan.counts, page_size, window)
    ends, last = page_counts(keys, page_size)
    rows = np.repeat(np.arange(len(keys)), np.diff(ends))
    columns = np.arange(len(rows)) - ends[rows] + first[rows]
    torch_device = page_table.device
    return PageIndices(
        ends,
        last,
        page_table[upload_int64(plan.slots[rows], torch_device), upload_int64(columns, torch_device)],
    )


def flatten_pages(table: Tensor, keys: Tensor, page_size: int, ids: Tensor) -> None:
    """Concatenates the pages of all rows (int32 [R, width], with `keys` [R] keys each) at the beginning of
    `ids`. Runs in captured bodies."""
    ends = ((keys + page_size - 1) // page_size).cumsum(0)
    places = torch.arange(len(ids), device=ids.device)
    rows = torch.searchsorted(ends, places, right=True).clamp_max(len(table) - 1)
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    ids.copy_(table[rows, (places - begins[rows]).clamp_max(table.shape[1] - 1)])

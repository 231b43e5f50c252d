"""FlashAttention 3 and 4 over pages: `--attention-backend fa3` (Shah et al., 2024; Dao-AILab's
flash_attn_interface, built from its folder hopper) and `fa4` (the package flash-attn-4). Written by their
documents; devices/attention_backends.py lists what each supports.

Both align a causal mask at the lower right corner of a row, read keys through a page table, and return the
log-sum-exp of each row.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.attention_backends import apply_sinks
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.kv_ranges import decode_page_table, kv_ranges, page_table_of
from runtime.layers.upload import upload


@dataclass(frozen=True, slots=True)
class FlashRows:
    """The rows of a phase, as the layers of one window see them."""

    table: Tensor  # int32 [R, pages]
    lengths: Tensor  # int32 [R], keys in it
    ends: Tensor | None  # int32 [R + 1]: where each row's queries begin; None: one query each
    longest: int  # queries of a row
    longest_keys: int  # of a row; of captured rows, that one may have


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """The rows of one phase of a step."""

    page_size: int
    rows: dict[int, FlashRows]  # window -> rows


class Flash(Protocol):
    """The call that the two packages have in common: attention output, and with `wants_lse` the
    log-sum-exp."""

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: FlashRows, scores: Scores, *, wants_lse: bool
    ) -> "Tensor | tuple[Tensor, ...]": ...


class FlashBackend:
    """What the two backends share; see AttentionBackend."""

    flash: Flash
    adds_sinks = False  # the kernel adds sinks itself; False: the log-sum-exp does

    def plan(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> FlashPlan:
        """Page tables and lengths of these rows, for each window."""
        ends, longest = None, int(plan.counts.max())
        if plan.num_decodes < len(plan.slots):
            ends = upload(np.concatenate(([0], plan.counts.cumsum())).astype(np.int32), page_tables.device)
        return FlashPlan(
            page_size,
            {
                window: FlashRows(
                    *page_table_of(plan, page_tables[-1 if window else 0], page_size, window),
                    ends,
                    longest,
                    int(kv_ranges(plan.starts, plan.counts, page_size, window)[1].max()),
                )
                for window in windows
            },
        )

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> FlashPlan:
        """The attention plan of captured decode rows, from tensors on the device alone."""
        rows = {}
        for window in windows:
            pages = page_tables[-1 if window else 0]
            table, keys = decode_page_table(slots, lengths, pages, page_size, window)
            rows[window] = FlashRows(table, keys, None, 1, table.shape[1] * page_size)
        return FlashPlan(page_size, rows)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, metadata: FlashPlan, scores: Scores) -> Tensor:
        """Attention of these rows' queries."""
        rows = metadata.rows[scores.window]
        pages = [cache.unflatten(0, (-1, metadata.page_size)) for cache in (keys, values)]
        queries = q.unsqueeze(1) if rows.ends is None else q  # [R, 1, H, D] or [T, H, D]
        wants_lse = scores.sinks is not None and not self.adds_sinks
        result = self.flash(queries, pages[0], pages[1], rows, scores, wants_lse=wants_lse)
        if scores.sinks is None or not wants_lse:
            return result.view(q.shape)
        out, lse = result[:2]  # float32 [R, H, 1] or [H, T]
        return apply_sinks(out.view(q.shape), lse.squeeze(2) if rows.ends is None else lse.T, scores.sinks)

    def replan(self, metadata: FlashPlan, lengths: np.ndarray) -> None:
        """Nothing to do: lengths are read on the device."""


class FlashAttention3Backend(FlashBackend):
    """FlashAttention 3: flash_attn_with_kvcache without new keys, which are in the cache already."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        from flash_attn_interface import flash_attn_with_kvcache

        def flash(
            q: Tensor, keys: Tensor, values: Tensor, rows: FlashRows, scores: Scores, *, wants_lse: bool
        ) -> Tensor | tuple[Tensor, ...]:
            return flash_attn_with_kvcache(
                q,
                keys,
                values,
                cache_seqlens=rows.lengths,
                page_table=rows.table,
                cu_seqlens_q=rows.ends,
                max_seqlen_q=None if rows.ends is None else rows.longest,
                softmax_scale=scores.scale,
                causal=True,
                window_size=(scores.window - 1, 0) if scores.window else (-1, -1),
                softcap=scores.cap,
                return_softmax_lse=wants_lse,
            )

        self.flash = flash


class FlashAttention4Backend(FlashBackend):
    """FlashAttention 4: flash_attn_varlen_func, which also takes rows of equal lengths as [R, 1, H, D]."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        from flash_attn.cute import flash_attn_varlen_func

        def flash(
            q: Tensor, keys: Tensor, values: Tensor, rows: FlashRows, scores: Scores, *, wants_lse: bool
        ) -> Tensor | tuple[Tensor, ...]:
            result = flash_attn_varlen_func(
                q,
                keys,
                values,
                cu_seqlens_q=rows.ends,
                max_seqlen_q=None if rows.ends is None else rows.longest,
                seqused_k=rows.lengths,
                page_table=rows.table,
                softmax_scale=scores.scale,
                causal=True,
                window_size=(scores.window - 1, 0) if scores.window else (None, None),
                softcap=scores.cap,
                num_splits=0,
                return_lse=wants_lse,
            )
            return result if wants_lse else result[0]

        self.flash = flash

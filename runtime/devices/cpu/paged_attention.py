"""Attention over pages by the kernels, one layer at a time: what a step does outside of a decoder's
program."""

import ctypes
import weakref

import torch
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.cpu.attention_plan import CpuAttentionPlan
from runtime.devices.cpu.cache_numbers import CACHE_NUMBERS, MAX_DIM
from runtime.devices.cpu.kernels.library import Heads, Step
from runtime.devices.cpu.matrices import Threads


class PagedAttention:
    """Attention of one layer after another, in memory that they share."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.functions = threads.functions
        self.handle: int = self.functions.kernels_attention(threads.handle)
        weakref.finalize(self, self.functions.kernels_free_attention, self.handle).atexit = False

    def takes(self, cache: Tensor, plan: CpuAttentionPlan) -> bool:
        """Whether the kernels read this cache [num_locations, K, D], and attend to such rows."""
        return cache.dtype in CACHE_NUMBERS and cache.shape[2] <= MAX_DIM and plan.is_plain

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: CpuAttentionPlan, scores: Scores
    ) -> Tensor:
        """See Ops.attention. Raises torch.OutOfMemoryError."""
        num_tokens, num_heads, dim = q.shape
        rows, out = q.float().contiguous(), torch.empty(q.shape)
        sinks, slopes = (None if x is None else x.float().contiguous() for x in (scores.sinks, scores.slopes))
        heads = Heads(
            num_heads=num_heads,
            num_kv_heads=k_cache.shape[1],
            dim=dim,
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            kind=CACHE_NUMBERS[k_cache.dtype],
            scale=scores.scale,
            cap=scores.cap,
            window=scores.window,
            sinks=None if sinks is None else sinks.data_ptr(),
            slopes=None if slopes is None else slopes.data_ptr(),
            k_scale=1.0,
            v_scale=1.0,
        )
        slots, starts, counts = plan.row_arrays
        table = plan.page_tables[-1 if scores.window else 0].contiguous()
        step = Step(
            num_tokens=num_tokens,
            num_rows=len(slots),
            slots=slots.ctypes.data,
            starts=starts.ctypes.data,
            counts=counts.ctypes.data,
            pages_per_slot=table.shape[1],
            page_size=plan.page_size,
            block=plan.rows.block_size,
            input=rows.data_ptr(),
            output=out.data_ptr(),
        )
        step.page_tables[0] = table.data_ptr()
        arguments = (self.threads.handle, self.handle, ctypes.addressof(heads), ctypes.addressof(step))
        if num_tokens and self.functions.kernels_attend(*arguments):
            raise torch.OutOfMemoryError(f"no memory for attention of {num_tokens} tokens")
        return out.to(q.dtype)

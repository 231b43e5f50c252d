"""torch's flex_attention over gathered pages: `--attention-backend flex_attention`. Compiled on a GPU, eager
in tests without one.

The keys of all rows are concatenated, and so are their queries; a block mask says which queries see which
keys, so that blocks of keys that no query sees cost nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.attention_backends import apply_sinks
from runtime.devices.cuda.kernels.launch import INTERPRETER, Gpu
from runtime.layers.attention.kv_dtype import read_as
from runtime.layers.upload import upload_int64


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """What the layers of one window share in a step."""

    locations: Tensor  # int64 [keys] in the cache
    mask: BlockMask


class FlexAttentionBackend:
    """flex_attention; see AttentionBackend."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        self.compiles = gpu != INTERPRETER
        self.attention: Callable[..., Tensor | tuple[Tensor, AuxOutput]] = (
            torch.compile(flex_attention, dynamic=True) if self.compiles else flex_attention
        )

    def plan(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> dict[int, FlexPlan]:
        """window -> plan of its layers."""
        return {
            window: self.window_plan(plan, page_tables[-1 if window else 0], page_size, window)
            for window in windows
        }

    def window_plan(self, plan: AttentionRows, page_table: Tensor, page_size: int, window: int) -> FlexPlan:
        """Locations of the keys and the block mask of one window; two copies to the device each."""
        starts, counts, torch_device = (
            plan.starts.astype(np.int64),
            plan.counts.astype(np.int64),
            page_table.device,
        )
        begins = np.maximum(starts - window + 1, 0) if window else np.zeros_like(starts)
        q_rows, q_places = flat_ranges(starts, counts)
        k_rows, k_places = flat_ranges(begins, starts + counts - begins)
        query_rows, query_places, key_rows, key_places = (
            upload_int64(x, torch_device) for x in (q_rows, q_places, k_rows, k_places)
        )
        slots = upload_int64(plan.slots[k_rows], torch_device)
        pages = page_table[slots, key_places // page_size].long()

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            distance = query_places[q] - key_places[k]
            visible = (query_rows[q] == key_rows[k]) & (distance >= 0)
            return visible & (distance < window) if window else visible

        mask = create_block_mask(
            sees, None, None, len(q_rows), len(k_rows), device=str(torch_device), _compile=self.compiles
        )
        return FlexPlan(pages * page_size + key_places % page_size, mask)

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> dict[int, FlexPlan]:
        """Not supported."""
        raise AssertionError("flex_attention is not captured")

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, metadata: dict[int, FlexPlan], scores: Scores
    ) -> Tensor:
        """Attention of these rows' queries."""
        window_plan = metadata[scores.window]
        read = [read_as(cache, window_plan.locations, q.dtype) for cache in (keys, values)]
        inputs = [x.transpose(0, 1).unsqueeze(0) for x in (q, *read)]
        aux_request = None if scores.sinks is None else AuxRequest(lse=True)
        result = self.attention(
            *inputs,
            score_mod=soft_cap(scores.cap, q.device) if scores.cap else None,
            block_mask=window_plan.mask,
            scale=scores.scale,
            enable_gqa=q.shape[1] != keys.shape[1],
            return_aux=aux_request,
        )
        out, aux = (result, None) if aux_request is None else result
        out = out.squeeze(0).transpose(0, 1)
        return (
            out
            if scores.sinks is None or aux is None
            else apply_sinks(out, aux.lse.squeeze(0).T, scores.sinks)
        )

    def replan(self, metadata: dict[int, FlexPlan], lengths: np.ndarray) -> None:
        """Not supported."""
        raise AssertionError("flex_attention is not captured")


def flat_ranges(firsts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranges of `counts` numbers from `firsts` on, concatenated: the row of each number, and the numbers."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - firsts, counts)


@cache
def soft_cap(cap: float, torch_device: torch.device) -> Callable[..., Tensor]:
    """A score_mod that caps scores, cached because a new function would be compiled again. The cap is a
    number on the device: with dynamic sizes, torch 2.11 makes an input of a Python float, which it cannot
    read in a score_mod."""
    limit = torch.tensor(cap, dtype=torch.float32, device=torch_device)
    return lambda score, b, h, q, k: limit * torch.tanh(score / limit)

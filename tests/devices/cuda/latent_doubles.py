"""Doubles of packages that need a GPU, most with latent attention (MLA): what they are called with is held
to their sources, and what they return is computed in float64. Of FlashMLA 1.0.0 (commit 9241ae3) and of
flashinfer-python 0.7.2.
"""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.cuda.attention_backends import apply_sinks
from tests.devices.cuda.doubles import HALVES, flash, int32, row

RANK, WIDTH = 512, 576


@dataclass
class FlashMLASchedMeta:
    """Made by the first call, which may be that of a warm-up; lengths may change with a captured one only."""

    shape: tuple[int, ...] | None = None
    lengths: Tensor | None = None


def over_pages(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """q [R, n, H, 576] over pages [pages, page_size, 576] -> [R, n, H, 512], causal at the lower right
    corner."""
    found = []
    for part, used, length in zip(q, table.long(), lengths.tolist(), strict=True):
        assert len(used) * pages.shape[1] >= length > 0, "a row longer than its page table"
        keys = pages[used[: -(-length // pages.shape[1])]].flatten(0, 1)[:length].unsqueeze(1)
        found.append(row(part, keys, keys[..., :RANK], scale, -1, 0.0)[0])
    return torch.stack(found).to(q.dtype)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: None = None,
    attn_sink: None = None,
    extra_k_cache: None = None,
    extra_indices_in_kvcache: None = None,
    topk_length: None = None,
    extra_topk_length: None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention on compute capability 9, of dense_decode.h."""
    assert num_splits is None and not is_fp8_kvcache and indices is None and softmax_scale is not None
    assert block_table is not None and cache_seqlens is not None and head_dim_v == RANK
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta)
    shape = (*q.shape[:3], *k_cache.shape[1:3], causal)
    if tile_scheduler_metadata.shape is None:
        tile_scheduler_metadata.shape, tile_scheduler_metadata.lengths = shape, cache_seqlens
    assert tile_scheduler_metadata.shape == shape and tile_scheduler_metadata.lengths is cache_seqlens
    assert q.dtype in HALVES and k_cache.dtype == q.dtype and q.stride(-1) == k_cache.stride(-1) == 1
    assert q.dim() == k_cache.dim() == 4 and q.shape[3] == k_cache.shape[3] == WIDTH
    assert k_cache.shape[1:3] == (64, 1) and causal == (q.shape[1] > 1)
    int32(cache_seqlens, len(q))
    assert block_table.dtype == torch.int32 and len(block_table) == len(q) and block_table.stride(-1) == 1
    out = over_pages(q, k_cache.squeeze(2), block_table, cache_seqlens, softmax_scale)
    return out, torch.zeros(q.shape[0], q.shape[2], q.shape[1])


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: None = None,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    sinks: None = None,
    skip_softmax_threshold_scale_factor: None = None,
    enable_pdl: None = None,
    backend: str = "auto",
) -> Tensor:
    """Its backend trtllm-gen on compute capability 10, dense."""
    assert backend == "trtllm-gen" and (kv_lora_rank, qk_rope_head_dim) == (RANK, WIDTH - RANK)
    assert query.dtype == kv_cache.dtype == torch.bfloat16 and query.dim() == 4 and query.shape[1] == 1
    assert query.shape[3] == kv_cache.shape[2] == WIDTH and kv_cache.dim() == 3
    assert kv_cache.shape[1] in (32, 64) and not 64 < query.shape[2] < 128 and kv_cache.stride(-1) == 1
    assert workspace_buffer.dtype == torch.uint8 and not workspace_buffer.any()
    int32(seq_lens, len(query))
    assert block_tables.dtype == torch.int32 and block_tables.dim() == 2 and block_tables.is_contiguous()
    assert len(block_tables) == len(query) and max_seq_len >= int(seq_lens.max()) and bmm2_scale == 1.0
    return over_pages(query, kv_cache, block_tables, seq_lens, bmm1_scale)


def trtllm_attention(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    window_left: int,
    sinks: Tensor | None,
    kv_layout: str,
    backend: str,
    ends: Tensor | None,
    longest: int,
) -> Tensor:
    """What both calls of heads have in common."""
    assert backend == "trtllm-gen" and kv_layout == "NHD" and bmm2_scale == 1.0 and query.is_contiguous()
    assert workspace_buffer.dtype == torch.uint8 and not workspace_buffer.any()
    assert kv_cache[0].shape[1] in (16, 32, 64) and query.shape[2] in (64, 128)
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == query.shape[1:2])
    assert block_tables.is_contiguous()
    q = query.unsqueeze(1) if ends is None else query
    rows = ends, longest, bmm1_scale, window_left, 0.0
    out, lse = flash(q, *kv_cache, block_tables, seq_lens, *rows)
    found = out.view(query.shape)
    return found if sinks is None else apply_sinks(found, lse.squeeze(2) if ends is None else lse.T, sinks)


def trtllm_batch_decode_with_kv_cache(query: Tensor, max_seq_len: int, **options: Any) -> Tensor:
    assert max_seq_len >= int(options["seq_lens"].max())
    return trtllm_attention(query, **options, ends=None, longest=1)


def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    max_q_len: int,
    max_kv_len: int,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    **options: Any,
) -> Tensor:
    int32(cum_seq_lens_q, batch_size + 1)
    int32(cum_seq_lens_kv, batch_size + 1)
    assert torch.equal(cum_seq_lens_kv.diff(), options["seq_lens"]) and cum_seq_lens_kv[0] == 0
    assert max_kv_len == int(options["seq_lens"].max())
    return trtllm_attention(query, **options, ends=cum_seq_lens_q, longest=max_q_len)


def install(patch: pytest.MonkeyPatch) -> None:
    """In place of the packages, for a test."""
    modules = {
        "flash_mla": {},
        "flash_mla.flash_mla_interface": {
            "FlashMLASchedMeta": FlashMLASchedMeta,
            "flash_mla_with_kvcache": flash_mla_with_kvcache,
        },
        "flashinfer": {},
        "flashinfer.decode": {"trtllm_batch_decode_with_kv_cache": trtllm_batch_decode_with_kv_cache},
        "flashinfer.prefill": {"trtllm_batch_context_with_kv_cache": trtllm_batch_context_with_kv_cache},
        "flashinfer.mla": {"trtllm_batch_decode_with_kv_cache_mla": trtllm_batch_decode_with_kv_cache_mla},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)

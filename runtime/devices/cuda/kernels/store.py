"""Stores of keys and values to the cache, both in one launch, as they are or as 8-bit floats."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.fp8_bytes import to_fp8
from runtime.devices.cuda.kernels.launch import FP8_KINDS, next_power_of_2


@triton.jit
def _store_heads(
    x: tl.tensor,
    cache: tl.tensor,
    token: tl.tensor,
    location: tl.tensor,
    stride: tl.tensor,
    head_stride: tl.tensor,
    cache_stride: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    """Stores the heads of one token, which are contiguous in the cache."""
    at = tl.arange(0, BLOCK)
    values = tl.load(x + token * stride + at // DIM * head_stride + at % DIM, mask=at < HEADS * DIM)
    if KIND != "":
        values = to_fp8(values.to(tl.float32), KIND)
    tl.store(cache + location * cache_stride + at, values.to(cache.dtype.element_ty), mask=at < HEADS * DIM)


@triton.jit(do_not_specialize_on_alignment=["locations"])
def store_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    locations: tl.tensor,
    k_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_stride: tl.tensor,
    v_head_stride: tl.tensor,
    k_cache_stride: tl.tensor,
    v_cache_stride: tl.tensor,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    """Grid (tokens, 2): keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    location = tl.load(locations + token).to(tl.int64)
    if tl.program_id(1) == 0:
        strides = k_stride, k_head_stride, k_cache_stride
        _store_heads(k, k_cache, token, location, *strides, HEADS, DK, BLOCK_K, KIND)
    else:
        strides = v_stride, v_head_stride, v_cache_stride
        _store_heads(v, v_cache, token, location, *strides, HEADS, DV, BLOCK_V, KIND)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, locations: Tensor) -> None:
    """Writes k [T, K, DK] and v [T, K, DV] to `locations` of the caches; see Ops.store_kv."""
    if len(k) == 0:
        return
    kind = FP8_KINDS.get(k_cache.dtype, "")
    caches = [cache.view(torch.uint8) if kind else cache for cache in (k_cache, v_cache)]
    heads, dim_k, dim_v = k.shape[1], k.shape[2], v.shape[2]
    store_kv_kernel[(len(k), 2)](
        k,
        v,
        *caches,
        locations,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        v_cache.stride(0),
        HEADS=heads,
        DK=dim_k,
        DV=dim_v,
        BLOCK_K=next_power_of_2(heads * dim_k),
        BLOCK_V=next_power_of_2(heads * dim_v),
        KIND=kind,
        num_warps=4,
    )

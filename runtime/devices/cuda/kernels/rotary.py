"""Rotary positions (Su et al., 2021), alone and fused with the norms of heads before them and the stores of
keys and values after them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.fp8_bytes import to_fp8
from runtime.devices.cuda.kernels.launch import FP8_KINDS, await_inputs, launch_options, next_power_of_2
from runtime.devices.cuda.kernels.norm import num_warps_for


@triton.jit
def rotary_kernel(
    x: tl.tensor,
    out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (tokens,): all heads of a token, padded to ROWS."""
    token, heads, at = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    is_there = (heads < HEADS)[:, None] & (at < HALF)[None, :]
    source = x + token * stride + heads[:, None] * head_stride + at[None, :]
    first = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_there, other=0.0).to(tl.float32)
    c = tl.load(cos + token * table_stride + at, mask=at < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * table_stride + at, mask=at < HALF, other=0.0)[None, :]
    target = out + (token * HEADS + heads[:, None]) * (2 * HALF) + at[None, :]
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=is_there)
    tl.store(target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=is_there)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, heads, D] by cos and sin, float32 [T, D / 2]."""
    out = x.new_empty(x.shape)
    if len(x):
        heads, half = x.shape[1], x.shape[2] // 2
        rows, block = next_power_of_2(heads), next_power_of_2(half, 8)
        rotary_kernel[(len(x),)](
            x,
            out,
            cos,
            sin,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            HEADS=heads,
            HALF=half,
            ROWS=rows,
            BLOCK=block,
            num_warps=num_warps_for(rows * block),
        )
    return out


@triton.jit(do_not_specialize_on_alignment=["locations"])
def prepare_heads_kernel(
    qkv: tl.tensor,
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    locations: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    stride: tl.tensor,
    table_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
    KIND: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid (tokens, H + 2 K): one query, key or value head in each program."""
    token, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    is_there = at < HALF
    await_inputs(EARLY)
    source = qkv + token * stride + head * (2 * HALF) + at
    first = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_there, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMS:
            scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
            factors = weight + head * (2 * HALF) + at
            first = first * scale * tl.load(factors, mask=is_there, other=0.0).to(tl.float32)
            second = second * scale * tl.load(factors + HALF, mask=is_there, other=0.0).to(tl.float32)
        c = tl.load(cos + token * table_stride + at, mask=is_there, other=0.0)
        s = tl.load(sin + token * table_stride + at, mask=is_there, other=0.0)
        rotated = first * c - second * s
        second = second * c + first * s
        first = rotated
    if head < HEADS:
        target = q + (token * HEADS + head) * (2 * HALF) + at
        tl.store(target, first.to(q.dtype.element_ty), mask=is_there)
        tl.store(target + HALF, second.to(q.dtype.element_ty), mask=is_there)
    else:
        location = tl.load(locations + token).to(tl.int64) * KV_HEADS
        if head < HEADS + KV_HEADS:
            cached = k_cache + (location + head - HEADS) * (2 * HALF) + at
        else:
            cached = v_cache + (location + head - HEADS - KV_HEADS) * (2 * HALF) + at
        _store_cached(cached, first.to(qkv.dtype.element_ty), is_there, KIND)
        _store_cached(cached + HALF, second.to(qkv.dtype.element_ty), is_there, KIND)


@triton.jit
def _store_cached(target: tl.tensor, x: tl.tensor, is_there: tl.tensor, KIND: tl.constexpr) -> None:
    """Stores `x`, which the caller has rounded to the dtype it would have between two kernels."""
    if KIND == "":
        tl.store(target, x.to(target.dtype.element_ty), mask=is_there)
    else:
        tl.store(target, to_fp8(x.to(tl.float32), KIND), mask=is_there)


def prepare_heads(
    qkv: Tensor,
    norm: tuple[Tensor, float] | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    locations: Tensor,
    early: bool = False,
) -> Tensor:
    """Norm, rotary positions and cache stores of qkv [T, (H + 2 K) * D] -> queries [T, H, D]; see
    Fused.prepare_heads. cos and sin float32 [T, D / 2]. `early`: see launch.starts_early."""
    kv_heads, dim = k_cache.shape[1:]
    num_heads = qkv.shape[1] // dim - 2 * kv_heads
    q = qkv.new_empty(len(qkv), num_heads, dim)
    if len(qkv):
        kind = FP8_KINDS.get(k_cache.dtype, "")
        caches = [cache.view(torch.uint8) if kind else cache for cache in (k_cache, v_cache)]
        weight, eps = (qkv, 0.0) if norm is None else norm
        prepare_heads_kernel[(len(qkv), num_heads + 2 * kv_heads)](
            qkv,
            q,
            *caches,
            locations,
            weight,
            cos,
            sin,
            qkv.stride(0),
            cos.stride(0),
            eps,
            HEADS=num_heads,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            BLOCK=next_power_of_2(dim // 2, 16),
            NORMS=norm is not None,
            KIND=kind,
            EARLY=early,
            num_warps=1,
            **launch_options(early=early),
        )
    return q

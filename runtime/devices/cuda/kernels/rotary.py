"""Rotary positions (Su et al., 2021), alone and as one pass over what a layer's projection made: norms of heads, turns, keys and values to
the cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.launch import NARROW, power
from runtime.devices.cuda.kernels.narrow import narrow
from runtime.devices.cuda.kernels.norm import warps_for


@triton.jit
def turn(x: tl.tensor, out: tl.tensor, cos: tl.tensor, sin: tl.tensor, stride: tl.tensor, head_stride: tl.tensor, table_stride: tl.tensor,
         HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """A program a token; heads in ROWS, padded."""
    token, heads, at = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    is_there = (heads < HEADS)[:, None] & (at < DIM)[None, :]
    line = x + token * stride + heads[:, None] * head_stride
    found = tl.load(line + at[None, :], mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(line + ((at + DIM // 2) % DIM)[None, :], mask=is_there, other=0.0).to(tl.float32)
    c = tl.load(cos + token * table_stride + at, mask=at < DIM, other=0.0).to(tl.float32)
    s = tl.load(sin + token * table_stride + at, mask=at < DIM, other=0.0).to(tl.float32)
    turned = found * c[None, :] + other * s[None, :]
    tl.store(out + (token * HEADS + heads[:, None]) * DIM + at[None, :], turned.to(out.dtype.element_ty), mask=is_there)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See Ops.rotary: x [T, heads, D]."""
    out = x.new_empty(x.shape)
    if len(x):
        heads, dim = x.shape[1:]
        rows, block = power(heads), power(dim, 16)
        turn[(len(x),)](x, out, cos, sin, x.stride(0), x.stride(1), cos.stride(0), HEADS=heads, DIM=dim, ROWS=rows, BLOCK=block,
                        num_warps=warps_for(rows * block))
    return out


@triton.jit
def prepare(qkv: tl.tensor, q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, locations: tl.tensor, weight: tl.tensor, cos: tl.tensor,
            sin: tl.tensor, stride: tl.tensor, table_stride: tl.tensor, eps: tl.tensor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
            DIM: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr, KIND: tl.constexpr) -> None:
    """Grid (tokens, query, key and value heads)."""
    token, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    other_at = (at + DIM // 2) % DIM
    line = qkv + token * stride + head * DIM
    found = tl.load(line + at, mask=at < DIM, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        other = tl.load(line + other_at, mask=at < DIM, other=0.0).to(tl.float32)
        if NORMS:
            scale = tl.rsqrt(tl.sum(found * found, 0) / DIM + eps)
            found = found * scale * tl.load(weight + head * DIM + at, mask=at < DIM, other=0.0).to(tl.float32)
            other = other * scale * tl.load(weight + head * DIM + other_at, mask=at < DIM, other=0.0).to(tl.float32)
        c = tl.load(cos + token * table_stride + at, mask=at < DIM, other=0.0).to(tl.float32)
        s = tl.load(sin + token * table_stride + at, mask=at < DIM, other=0.0).to(tl.float32)
        found = found * c + other * s
    if head < HEADS:
        tl.store(q + (token * HEADS + head) * DIM + at, found.to(q.dtype.element_ty), mask=at < DIM)
    else:
        place = tl.load(locations + token).to(tl.int64) * KV_HEADS
        kept = found.to(qkv.dtype.element_ty).to(tl.float32)  # as it would be between two kernels
        code = kept.to(k_cache.dtype.element_ty) if KIND == "" else narrow(kept, KIND)
        if head < HEADS + KV_HEADS:
            tl.store(k_cache + (place + head - HEADS) * DIM + at, code, mask=at < DIM)
        else:
            tl.store(v_cache + (place + head - HEADS - KV_HEADS) * DIM + at, code, mask=at < DIM)


def prepare_qkv(qkv: Tensor, num_heads: int, k_cache: Tensor, v_cache: Tensor, locations: Tensor, cos: Tensor, sin: Tensor,
                weight: Tensor | None, eps: float) -> Tensor:
    """qkv [T, (H + 2 K) * D] -> turned queries [T, H, D]; keys, turned, and values go to their places in the caches.

    `weight` [H + K, D]: of the norms of query and key heads, before the turn. cos and sin as in Ops.rotary.
    """
    kv_heads, dim = k_cache.shape[1:]
    q = qkv.new_empty(len(qkv), num_heads, dim)
    if len(qkv):
        kind = NARROW.get(k_cache.dtype, "")
        caches = [cache.view(torch.uint8) if kind else cache for cache in (k_cache, v_cache)]
        prepare[(len(qkv), num_heads + 2 * kv_heads)](
            qkv, q, *caches, locations, qkv if weight is None else weight, cos, sin, qkv.stride(0), cos.stride(0), eps, HEADS=num_heads,
            KV_HEADS=kv_heads, DIM=dim, BLOCK=power(dim, 16), NORMS=weight is not None, KIND=kind, num_warps=1)
    return q

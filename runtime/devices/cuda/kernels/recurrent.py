"""One token of recurrent layers: each sequence's state is read, moved on and written in one launch, where
torch gathers states, computes new ones and scatters them (layers/recurrent/, the definition).

A program has a block of one head's state and all that is summed over in it, so no two programs write the same
number. Everything is computed in float32, whatever the type of states.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.launch import next_power_of_2

BLOCK = 32  # columns of a state in a program


@triton.jit
def scan_kernel(
    x: tl.tensor,
    step: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    a: tl.tensor,
    state: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
) -> None:
    """Grid (rows, heads, blocks of SIZE). state [slots, heads, SIZE, KEPT] with `stride` between slots; x and
    out [rows, heads, SIZE], step [rows, heads], b and c [rows, GROUPS, KEPT], a [heads]."""
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at, kept = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_KEPT)
    is_there = (at < SIZE)[:, None] & (kept < KEPT)[None, :]
    group = head // (heads // GROUPS)
    place = tl.load(slots + row) * stride + head * SIZE * KEPT + at[:, None] * KEPT + kept[None, :]
    before = tl.load(state + place, mask=is_there, other=0.0).to(tl.float32)
    time = tl.load(step + row * heads + head)
    given = tl.load(x + (row * heads + head) * SIZE + at, mask=at < SIZE, other=0.0) * time
    writes = tl.load(b + (row * GROUPS + group) * KEPT + kept, mask=kept < KEPT, other=0.0)
    reads = tl.load(c + (row * GROUPS + group) * KEPT + kept, mask=kept < KEPT, other=0.0)
    after = before * tl.exp(time * tl.load(a + head)) + given[:, None] * writes[None, :]
    tl.store(state + place, after.to(state.dtype.element_ty), mask=is_there)
    tl.store(out + (row * heads + head) * SIZE + at, tl.sum(after * reads[None, :], 1), mask=at < SIZE)


@triton.jit
def delta_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    rate: tl.tensor,
    state: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> None:
    """Grid (rows, heads, blocks of VALUES). state [slots, heads, KEYS, VALUES] with `stride` between slots; q
    and k [rows, heads, KEYS], v and out [rows, heads, VALUES], g [rows, heads, DECAYS], where DECAYS is 1 or
    KEYS, rate [rows, heads]."""
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at, keys = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_KEYS)
    is_there = (keys < KEYS)[:, None] & (at < VALUES)[None, :]
    line = row * heads + head
    place = tl.load(slots + row) * stride + head * KEYS * VALUES + keys[:, None] * VALUES + at[None, :]
    query = tl.load(q + line * KEYS + keys, mask=keys < KEYS, other=0.0)
    key = tl.load(k + line * KEYS + keys, mask=keys < KEYS, other=0.0)
    value = tl.load(v + line * VALUES + at, mask=at < VALUES, other=0.0)
    decay = tl.exp(tl.load(g + line * DECAYS + keys % DECAYS, mask=keys < KEYS, other=0.0))
    kept = tl.load(state + place, mask=is_there, other=0.0).to(tl.float32) * decay[:, None]
    written = (value - tl.sum(kept * key[:, None], 0)) * tl.load(rate + line)
    after = kept + key[:, None] * written[None, :]
    tl.store(state + place, after.to(state.dtype.element_ty), mask=is_there)
    tl.store(out + line * VALUES + at, tl.sum(after * query[:, None], 0), mask=at < VALUES)


class TritonStateSteps:
    """See StateSteps."""

    def scan(self, a: Tensor, inputs: tuple[Tensor, ...], state: Tensor, slots: Tensor) -> Tensor:
        """See StateSteps.scan."""
        x, step, b, c = (part.contiguous() for part in inputs)
        rows, heads, size = x.shape
        out, kept = torch.empty_like(x), state.shape[3]
        blocks = min(BLOCK, next_power_of_2(size))
        scan_kernel[(rows, heads, triton.cdiv(size, blocks))](
            x,
            step,
            b,
            c,
            a.contiguous(),
            state,
            slots,
            out,
            state.stride(0),
            GROUPS=b.shape[1],
            SIZE=size,
            KEPT=kept,
            BLOCK=blocks,
            BLOCK_KEPT=next_power_of_2(kept),
        )
        return out

    def delta(self, inputs: tuple[Tensor, ...], state: Tensor, slots: Tensor) -> Tensor:
        """See StateSteps.delta."""
        q, k, v, g, rate = (part.contiguous() for part in inputs)
        rows, heads, values = v.shape
        out, blocks = torch.empty_like(v), min(BLOCK, next_power_of_2(values))
        delta_kernel[(rows, heads, triton.cdiv(values, blocks))](
            q,
            k,
            v,
            g,
            rate,
            state,
            slots,
            out,
            state.stride(0),
            KEYS=q.shape[2],
            VALUES=values,
            DECAYS=g.shape[2],
            BLOCK=blocks,
            BLOCK_KEYS=next_power_of_2(q.shape[2]),
        )
        return out

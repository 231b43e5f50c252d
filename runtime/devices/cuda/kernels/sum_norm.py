"""The sum over ranks of small tensors, the addition of a residual and the RMS norm, in one launch, through
memory that the GPUs of the ranks share.

A program has a row. It stores its rank's part in its own memory, where all others read it, and tells each of
them by a flag; when the flags of all others are there, it reads their parts and adds them up in the order of
the ranks, so that all ranks have the same sum to the bit.

No rank waits at the end. A row's parts are in two places by turns; a flag is the number of the row's turn:
a rank that sees another's flag of turn n + 1 knows that this one has ended turn n, as its launches run one
after the other; so before it begins turn n + 2, in the place of n, all have read n. Turns are counted on the
device, so that a captured launch may be replayed.
"""

import triton
import triton.language as tl

from runtime.devices.cuda.kernels.activation_quantization import quantize_held
from runtime.devices.cuda.kernels.launch import await_inputs


@triton.jit
def _flag(address: tl.tensor, row: tl.tensor, rank: tl.tensor, RANKS: tl.constexpr) -> tl.tensor:
    """Where rank `rank` tells the owner of the memory at `address` about a row."""
    return (address + (row * RANKS + rank) * 4).to(tl.pointer_type(tl.int32))


@triton.jit
def _part(address: tl.tensor, offset: tl.tensor, like: tl.tensor) -> tl.tensor:
    """The first number of a row's part in the memory at `address`: a pointer as `like`."""
    return tl.multiple_of((address + offset).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit(do_not_specialize=["rank"])
def sum_rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    codes: tl.tensor,
    code_scales: tl.tensor,
    addresses: tl.tensor,
    turns: tl.tensor,
    rank: tl.tensor,
    stride: tl.tensor,
    residual_stride: tl.tensor,
    num_scales: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid (rows,): as add_rms_norm_kernel, with the sum over ranks in place of x. `addresses`: int64
    [RANKS], of each rank's memory: int32 flags [ROWS, RANKS] in FLAG_BYTES, then parts [2, ROWS] of
    ROW_BYTES. `turns`: int32 [ROWS], how often each row was summed."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_there = at < SIZE
    await_inputs(EARLY)
    turn = tl.load(turns + row) + 1
    offset = FLAG_BYTES + ((turn & 1).to(tl.int64) * ROWS + row) * ROW_BYTES
    own = tl.load(addresses + rank)
    part = tl.load(x + row * stride + at, mask=is_there, other=0.0)
    tl.store(_part(own, offset, x) + at, part, mask=is_there)
    tl.debug_barrier()  # all threads of this program have stored
    for other in tl.static_range(RANKS):
        tl.atomic_xchg(_flag(tl.load(addresses + other), row, rank, RANKS), turn, sem="release", scope="sys")
    for other in tl.static_range(RANKS):
        flag = _flag(own, row, other, RANKS)
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - turn < 0:  # also where turns overflow
            pass
    total = tl.zeros((BLOCK,), tl.float32)
    for other in tl.static_range(RANKS):
        given = _part(tl.load(addresses + other), offset, x) + at
        total += tl.load(given, mask=is_there, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(turns + row, turn)
    residual_at = residual + row * residual_stride + at
    total = total.to(x.dtype.element_ty).to(tl.float32)
    total += tl.load(residual_at, mask=is_there, other=0.0).to(tl.float32)
    kept = total.to(residual.dtype.element_ty)
    tl.store(residual_at, kept, mask=is_there)
    total = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / SIZE + eps)
    factors = tl.load(weight + at, mask=is_there, other=0.0).to(tl.float32)
    normed = (total * scale * factors).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + at, normed, mask=is_there)
    if KIND != "":
        scales_at = code_scales + row * num_scales
        quantize_held(normed.to(tl.float32), codes + row * SIZE, scales_at, row * 0, SIZE, KIND, GROUP, BLOCK)

"""What the programs of a decode step's attention have to do, listed on the device: the option
`--enable-decode-work-list`.

Rows of a step may have a hundred keys or a hundred thousand, and only the device knows. So a launch has as
many programs as fill the GPU and one more for each row, and each of them finds in a list which row it has,
and which part of its keys. A row is split into so many parts that none has more tiles of keys than the tiles
of all rows would leave to each program: a long row is walked by many programs, and a short one by one.

    tiles of keys      row 0 | 1 |      row 2          | 3 |    at most 3 in a part
    parts               a  b | c | d   e   f   g   h   | i |
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.launch import next_power_of_2

LEAST_TILES = 4  # of a part, for which merging it with others costs little
MOST_ROWS = 1024  # that one program lists
BLOCK = 32  # parts that it writes at a time


@triton.jit(do_not_specialize=["num_rows", "stride", "num_parts", "wanted"])
def list_work_kernel(
    work: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    num_parts: tl.tensor,
    wanted: tl.tensor,
    WINDOW: tl.constexpr,
    N: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: int32 work [3, num_parts] of decode rows [4, num_rows], as of paged_attention_kernel: the
    row of each part, its number in the row, and the row's number of parts. What is left over is part 1 of 1
    of row 0, which has no keys. About `wanted` parts are made of as many tiles each, and `num_parts` is that
    and num_rows."""
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    last = tl.load(rows + stride + row, mask=is_row, other=-1) + 1
    first = last * 0
    if WINDOW > 0:
        first = tl.maximum(last - WINDOW, 0) // N * N
    tiles = (last - first + N - 1) // N
    size = tl.maximum((tl.sum(tiles, 0) + wanted - 1) // wanted, LEAST)
    parts = tl.where(is_row, tl.maximum((tiles + size - 1) // size, 1), 0)
    ends = tl.cumsum(parts, 0)
    for begin in range(0, num_parts, BLOCK):
        part = begin + tl.arange(0, BLOCK)
        is_before = (ends[None, :] <= part[:, None]) & is_row[None, :]
        own = tl.sum(is_before.to(tl.int32), 1)
        is_own = row[None, :] == own[:, None]
        number = part - tl.sum(tl.where(is_before, parts[None, :], 0), 1)
        count = tl.sum(tl.where(is_own, parts[None, :], 0), 1)
        is_used = own < num_rows
        is_part = part < num_parts
        tl.store(work + part, tl.where(is_used, own, 0), mask=is_part)
        tl.store(work + num_parts + part, tl.where(is_used, number, 1), mask=is_part)
        tl.store(work + 2 * num_parts + part, tl.where(is_used, count, 1), mask=is_part)


def list_work(rows: Tensor, num_parts: int, window: int, tile: int) -> Tensor:
    """The parts of decode rows, int32 [4, R] as of AttentionLaunch, as int32 [3, R + num_parts]; see
    list_work_kernel. `tile`: keys that a program reads at a time."""
    num_rows = rows.shape[1]
    work = torch.empty(3, num_rows + num_parts, dtype=torch.int32, device=rows.device)
    list_work_kernel[(1,)](
        work,
        rows,
        num_rows,
        rows.stride(0),
        num_rows + num_parts,
        num_parts,
        WINDOW=window,
        N=tile,
        LEAST=LEAST_TILES,
        ROWS=next_power_of_2(num_rows, 16),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return work

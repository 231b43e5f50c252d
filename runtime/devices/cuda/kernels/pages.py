"""Copies of whole pages between the GPU and page-locked host memory, which the GPU reads and writes in
place."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["source_rows", "target_rows"])
def copy_rows_kernel(
    source: tl.tensor,
    target: tl.tensor,
    source_rows: tl.tensor,
    target_rows: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    width: tl.tensor,
    part: tl.tensor,
    source_step: tl.tensor,
    target_step: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows, blocks of a row). A row's `width` elements are parts of `part` elements each, which begin
    `source_step` and `target_step` elements after one another. Strides, steps and sizes in elements."""
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = source + tl.load(source_rows + row).to(tl.int64) * source_stride
    end = target + tl.load(target_rows + row).to(tl.int64) * target_stride
    number, inside = at // part, at % part
    values = tl.load(begin + number * source_step + inside, mask=at < width)
    tl.store(end + number * target_step + inside, values, mask=at < width)

"""Memory formats of weights and pages on NPUs."""

import torch_npu
from torch import Tensor

FRACTAL_NZ = 29  # ACL_FORMAT_FRACTAL_NZ: tiles of 16 x 32 bytes, as the matrix unit reads them
ROWS, ROW_BYTES = 16, 32
LANES = 16  # 16-bit numbers in a row of an NZ tile


def takes_nz(weight: Tensor) -> bool:
    """Whether a matrix, or a stack of matrices, is of 16-bit or 8-bit numbers and of whole tiles."""
    rows, columns = weight.shape[-2:]
    return weight.itemsize <= 2 and rows % ROWS == 0 and columns * weight.itemsize % ROW_BYTES == 0


def to_nz(weight: Tensor) -> Tensor:
    """A weight in FRACTAL_NZ where `takes_nz` says so; else unchanged."""
    return torch_npu.npu_format_cast(weight, FRACTAL_NZ) if takes_nz(weight) else weight


def written_pages(cache: Tensor, page_size: int, is_nz: bool) -> Tensor:
    """A cache [pages * page_size, K, D] as operators write it: [pages, page_size, K, D], or in NZ [pages, K *
    D / 16, page_size, 16]."""
    if not is_nz:
        return cache.view(-1, page_size, *cache.shape[1:])
    return cache.view(-1, cache.shape[1] * cache.shape[2] // LANES, page_size, LANES)

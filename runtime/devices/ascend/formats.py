"""Memory formats of weights on NPUs."""

import torch_npu
from torch import Tensor

FRACTAL_NZ = 29  # ACL_FORMAT_FRACTAL_NZ: tiles of 16 x 32 bytes, as the matrix unit reads them
ROWS, ROW_BYTES = 16, 32


def to_nz(weight: Tensor) -> Tensor:
    """A matrix, or a stack of matrices, of 16-bit or 8-bit numbers in FRACTAL_NZ where its sizes are
    multiples of a tile's; else unchanged."""
    rows, columns = weight.shape[-2:]
    if weight.itemsize <= 2 and rows % ROWS == 0 and columns * weight.itemsize % ROW_BYTES == 0:
        return torch_npu.npu_format_cast(weight, FRACTAL_NZ)
    return weight

"""Single products by the kernels: what a step does outside of a decoder's program."""

import ctypes
import weakref

import torch
from torch import Tensor

from runtime.devices.cpu.kernels.library import Step
from runtime.devices.cpu.matrices import Matrix, Threads


class Products:
    """y = x Wᵀ + b for packed matrices, one after another in memory that they share."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.functions = threads.functions
        self.handle: int = self.functions.kernels_product()
        weakref.finalize(self, self.functions.kernels_free_product, self.handle).atexit = False

    def multiply(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        """x [N, in] -> [N, out] in the dtype of x. Raises torch.OutOfMemoryError."""
        rows = x.float().contiguous()
        out = torch.empty(len(rows), matrix.outputs)
        step = Step(num_tokens=len(rows), input=rows.data_ptr(), output=out.data_ptr())
        arguments = (self.threads.handle, self.handle, matrix.handle, ctypes.addressof(step))
        if len(rows) and self.functions.kernels_multiply(*arguments):
            raise torch.OutOfMemoryError(f"no memory for a product of {len(rows)} rows")
        return (out if bias is None else out.add_(bias)).to(x.dtype)

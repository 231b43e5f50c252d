"""All-reduce of small tensors through memory that all GPUs of a model read and write directly
(torch.distributed._symmetric_memory).

    bytes of the tensor          algorithm
    up to ONE_SHOT               one shot: every GPU reads the tensors of all others and sums them
    up to the buffer's size      two shots: every GPU sums a part and writes it to all others
    more, or another dtype       NCCL

Tensors go through one buffer. The operators begin and end with a barrier of the GPUs, so the next sum may
follow at once. Sums are tried once at start, on all ranks, before the first one counts.
"""

from typing import Protocol

import torch
from torch import Tensor

ONE_SHOT = 256 << 10
BUFFER = 8 << 20
ALIGNED = 16  # bytes that the operators read at once
DTYPES = (torch.bfloat16, torch.float32)  # that the operators sum


class SymmetricOps(Protocol):
    """The operators of torch.ops.symm_mem that are used here."""

    def one_shot_all_reduce(self, x: Tensor, op: str, group: str) -> Tensor:
        """The sum over ranks, in a new tensor."""
        ...

    def two_shot_all_reduce_(self, x: Tensor, op: str, group: str) -> Tensor:
        """The sum over ranks, in place."""
        ...


class SymmetricSums:
    """One rank's buffer, which the other ranks of the group can address."""

    def __init__(self, buffer: Tensor, group: str, size: int, ops: SymmetricOps) -> None:
        """`ops`: torch.ops.symm_mem."""
        self.buffer = buffer
        self.group = group
        self.size = size
        self.ops = ops

    @classmethod
    def open(cls, group: str, size: int, torch_device: torch.device) -> "SymmetricSums":
        """Called by all ranks of the group. Raises RuntimeError where the GPUs cannot read each other's
        memory."""
        from torch.distributed import _symmetric_memory

        buffer = _symmetric_memory.empty(BUFFER, dtype=torch.uint8, device=torch_device)
        _symmetric_memory.rendezvous(buffer, group)
        return cls(buffer, group, size, torch.ops.symm_mem)

    def check(self, rank: int) -> None:
        """Sums numbers that all ranks know, by each algorithm. Raises RuntimeError for a wrong sum."""
        ranks, unit = self.size * (self.size - 1) // 2, ALIGNED * self.size
        for num_bytes in (unit, (ONE_SHOT // unit + 1) * unit):
            for dtype in DTYPES:
                # small integers, which both dtypes hold exactly
                pattern = torch.arange(num_bytes // dtype.itemsize, device=self.buffer.device) % 7
                for turn in range(2):
                    found = self.sum((pattern + rank + turn).to(dtype))
                    expected = (self.size * (pattern + turn) + ranks).to(dtype)
                    if found is None or not torch.equal(found, expected):
                        raise RuntimeError(f"a sum of {num_bytes} bytes in {dtype} was wrong")

    def sum(self, x: Tensor) -> Tensor | None:
        """The sum over ranks; None, on all ranks, where NCCL must do it."""
        if x.dtype not in DTYPES or x.nbytes > len(self.buffer) or x.nbytes % ALIGNED or not x.nbytes:
            return None
        is_small = x.nbytes <= ONE_SHOT
        if not is_small and x.nbytes % (ALIGNED * self.size):
            return None
        shared = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        shared.copy_(x)
        if is_small:
            return self.ops.one_shot_all_reduce(shared, "sum", self.group)
        self.ops.two_shot_all_reduce_(shared, "sum", self.group)
        return x.copy_(shared)

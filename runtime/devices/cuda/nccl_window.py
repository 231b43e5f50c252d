"""All-reduce through memory that NCCL has registered at the same place on all GPUs (--enable-symm-mem): NCCL
2.27 and later has kernels for such memory that need fewer steps.

Tensors of up to BUFFER bytes are copied to one buffer, summed there and copied back, on the stream of the
step.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.errors import StartError

BUFFER = 8 << 20


class WindowSums:
    """One rank's registered buffer."""

    def __init__(self, buffer: Tensor, group: dist.ProcessGroup) -> None:
        self.buffer = buffer
        self.group = group

    @classmethod
    def open(cls, group: dist.ProcessGroup, torch_device: torch.device) -> "WindowSums":
        """Called by all ranks of the group. Raises StartError where torch or NCCL cannot register memory."""
        try:
            backend = group._get_backend(torch_device)
            pool = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(pool):
                buffer = torch.empty(BUFFER, dtype=torch.uint8, device=torch_device)
            backend.register_mem_pool(pool, symm=True)
        except (AttributeError, TypeError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise StartError(
                f"--enable-symm-mem: this torch and its NCCL register no symmetric memory ({reason}); leave "
                "it out, or take --enable-torch-symm-mem"
            ) from error
        return cls(buffer, group)

    def sum(self, x: Tensor) -> Tensor | None:
        """The sum over ranks, in `x`; None, on all ranks, where the tensor is too large."""
        if x.nbytes > len(self.buffer) or not x.nbytes:
            return None
        shared = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        shared.copy_(x)
        dist.all_reduce(shared, group=self.group)
        return x.copy_(shared)

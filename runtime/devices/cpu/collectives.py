"""Collectives of the cpu device: gloo."""

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.devices.torch_collectives import TorchCollectives


class GlooCollectives(TorchCollectives):
    """Collectives of ranks that compute on a CPU."""

    def __init__(self, rank: int, size: int, rendezvous: str, *, num_stages: int = 1) -> None:
        super().__init__("gloo", rank, size, rendezvous, num_stages=num_stages)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' `x`, joined in dimension `dim`; gloo gathers into a list of tensors."""
        parts, x = [torch.empty_like(x) for _ in range(self.size)], x.contiguous()
        self.wait(dist.all_gather(parts, x, self.group, self.is_async))
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sum of all ranks' `x`, by rows. Gloo has no kernel for it, so `x` is
        overwritten with the whole sum."""
        return self.all_reduce(x).chunk(self.size)[self.rank].clone()

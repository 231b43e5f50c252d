"""Collectives of the cuda device: NCCL on the stream of the step, and symmetric memory for small sums."""

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.devices.cuda.symmetric_memory import SymmetricSums
from runtime.devices.torch_collectives import TorchCollectives


class NcclCollectives(TorchCollectives):
    """Collectives of the GPUs of one model."""

    def __init__(
        self,
        rank: int,
        size: int,
        rendezvous: str,
        torch_device: torch.device,
        *,
        symm_mem: bool = False,
        num_stages: int = 1,
    ) -> None:
        """`symm_mem`: small sums go through memory that the GPUs share. Raises StartError where they cannot
        share it."""
        super().__init__("nccl", rank, size, rendezvous, torch_device, num_stages=num_stages)
        group = dist.group.WORLD if self.group is None else self.group
        self.sums = SymmetricSums.open(group.group_name, size, torch_device) if symm_mem else None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in `x` or, if it is small, in a tensor of its own."""
        if self.sums is not None and (total := self.sums.sum(x)) is not None:
            return total
        return super().all_reduce(x)

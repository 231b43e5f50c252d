"""Collectives of the cuda device: NCCL on the stream of the step, and for small sums symmetric memory,
torch's or NCCL's own."""

from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.devices.cuda.nccl_window import WindowSums
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
        nccl_window: bool = False,
        num_stages: int = 1,
    ) -> None:
        """`symm_mem`: small sums go through memory that the GPUs share, by torch; `nccl_window`: by NCCL.
        Raises StartError where they cannot share it."""
        super().__init__("nccl", rank, size, rendezvous, torch_device, num_stages=num_stages)
        group = dist.group.WORLD if self.group is None else self.group
        self.sums: SymmetricSums | WindowSums | None = None
        if symm_mem:
            self.sums = SymmetricSums.open(group.group_name, size, torch_device)
        elif nccl_window:
            self.sums = WindowSums.open(group, torch_device)

    def _of_group(self, group: dist.ProcessGroup, part: range) -> Self:
        """As the base class; the memory that GPUs share is that of all ranks."""
        own = super()._of_group(group, part)
        own.sums = None
        return own

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in `x` or, if it is small, in a tensor of its own."""
        if self.sums is not None and (total := self.sums.sum(x)) is not None:
            return total
        return super().all_reduce(x)

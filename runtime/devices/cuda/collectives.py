"""Collectives of the cuda device: NCCL on the stream of the step, and for small sums symmetric memory,
torch's or NCCL's own."""

from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from runtime import log
from runtime.devices.cuda.nccl_window import WindowSums
from runtime.devices.cuda.norm_sums import NormSums
from runtime.devices.cuda.options import SymmetricMemory
from runtime.devices.cuda.symmetric_memory import SymmetricSums
from runtime.devices.torch_collectives import TorchCollectives
from runtime.errors import StartError


def first_line(error: RuntimeError) -> str:
    """What an error of torch says, without where in C++."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class NcclCollectives(TorchCollectives):
    """Collectives of the GPUs of one model."""

    def __init__(
        self,
        rank: int,
        size: int,
        rendezvous: str,
        torch_device: torch.device,
        *,
        symm_mem: SymmetricMemory = "off",
        nccl_window: bool = False,
        num_stages: int = 1,
    ) -> None:
        """`symm_mem`: small sums go through memory that the GPUs share, by torch; with "try" where they can,
        and it gives the right sums; `nccl_window`: by NCCL, unless torch's is "on". Raises StartError where
        they cannot, and shall."""
        super().__init__("nccl", rank, size, rendezvous, torch_device, num_stages=num_stages)
        group = dist.group.WORLD if self.group is None else self.group
        self.sums: SymmetricSums | WindowSums | None = None
        if nccl_window and symm_mem != "on":
            self.sums = WindowSums.open(group, torch_device)
        elif symm_mem != "off" and size > 1:
            self.sums = self._open_sums(group.group_name, torch_device, is_required=symm_mem == "on")

    def _open_sums(
        self, group: str, torch_device: torch.device, *, is_required: bool
    ) -> SymmetricSums | None:
        """The memory that all GPUs of the group share; None, on all ranks of all stages, where one of them
        cannot."""
        sums, fault = None, ""
        try:
            sums = SymmetricSums.open(group, self.size, torch_device)
        except RuntimeError as error:
            fault = first_line(error)
        faults = [found for found in self.outcomes(fault) if found]
        if sums is not None and not faults:  # all of them have it, so none waits for another in vain
            try:
                sums.check(self.rank)
            except RuntimeError as error:
                fault = first_line(error)
            faults = [found for found in self.outcomes(fault) if found]
        if not faults:
            return sums
        if is_required:
            raise StartError(
                f"--enable-torch-symm-mem: these GPUs cannot share memory ({faults[0]}); leave it out"
            )
        log.get("ranks").warning("sums go through NCCL: the GPUs cannot share memory", reason=faults[0])
        return None

    def open_norm_sums(self, torch_device: torch.device) -> NormSums | None:
        """Memory through which norms sum (norm_sums.py), tried on all ranks; None, on all of them: without
        shared memory, and with a line in the log where it is there and norms cannot use it."""
        if not isinstance(self.sums, SymmetricSums):
            return None
        sums, fault = None, ""
        try:
            sums = NormSums.open(self.sums.group, self.rank, self.size, torch_device)
        except RuntimeError as error:
            fault = first_line(error)
        faults = [found for found in self.outcomes(fault) if found]
        if sums is not None and not faults:  # all of them have it, so none waits for another in vain
            try:
                sums.check()
            except RuntimeError as error:
                fault = first_line(error)
            faults = [found for found in self.outcomes(fault) if found]
        if not faults:
            return sums
        log.get("ranks").warning("norms do not sum what ranks have parts of", reason=faults[0])
        return None

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

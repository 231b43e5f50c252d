"""Collectives of Ascend NPUs: HCCL on the current stream.

HCCL allocates its buffers at the first exchange, so a rank makes one before it measures its free memory.
"""

from typing import Protocol, cast

import torch
import torch.distributed as dist
import torch_npu

from runtime.devices.torch_collectives import TorchCollectives
from runtime.errors import StartError


class HcclCollectives(TorchCollectives):
    """Collectives of the NPUs of one model."""

    def __init__(
        self, rank: int, size: int, rendezvous: str, torch_device: torch.device, *, num_stages: int = 1
    ) -> None:
        """Raises StartError where the ranks do not find each other."""
        try:
            super().__init__("hccl", rank, size, rendezvous, num_stages=num_stages)
            self.all_reduce(torch.zeros(1, device=torch_device)).cpu()
        except RuntimeError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise StartError(
                f"HCCL does not link rank {rank} with the other {size * num_stages - 1} ({reason}); look at "
                "runtime check "
                "doctor, "
                "at the others' NPUs in npu-smi info, and at HCCL_SOCKET_IFNAME and HCCL_CONNECT_TIMEOUT"
            ) from error

    def own_group(self, buffer_mb: int) -> dist.ProcessGroup:
        """One more group of this stage's ranks, for operators that exchange by themselves, with a buffer of
        `buffer_mb` megabytes for each direction. All ranks of all stages call it."""
        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_buffer_size": buffer_mb}
        count = 1 if self.stages is None else self.stages.stage.count
        index = 0 if self.stages is None else self.stages.stage.index
        groups = [
            dist.new_group(list(range(stage * self.size, (stage + 1) * self.size)), pg_options=options)
            for stage in range(count)
        ]
        return cast(dist.ProcessGroup, groups[index])


class HcclBackend(Protocol):
    """The part of torch_npu's process group that the runtime uses."""

    def get_hccl_comm_name(self, rank: int) -> str:
        """HCCL's name of the group."""
        ...


def group_name(rank: int, group: dist.ProcessGroup) -> str:
    """HCCL's name of the ranks of a group, for operators that exchange by themselves. `rank`: this one's
    number in the group."""
    backend = group._get_backend(torch.device("npu"))
    return str(cast(HcclBackend, backend).get_hccl_comm_name(rank))

"""Exchange between ranks on NPUs: HCCL through torch.distributed.

HCCL takes its buffers at the first exchange, so a rank makes one before it counts its free memory. Every rank
calls the same method in the same order, on the current stream, which is what HCCL needs as well.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.devices.rendezvous import Rendezvous
from runtime.errors import StartError


class Hccl:
    """Ranks of one start, which meet at a file (`rendezvous`) that none of an earlier start has used."""

    def __init__(self, rank: int, size: int, rendezvous: str, torch_device: torch.device) -> None:
        """Raises StartError where the ranks do not find each other."""
        self.rank = rank
        self.size = size
        store = dist.FileStore(rendezvous, size)
        self.outcomes = Rendezvous(store, rank, size).outcomes
        try:
            dist.init_process_group("hccl", store=store, rank=rank, world_size=size)
            self.all_reduce(torch.zeros(1, device=torch_device)).cpu()
        except RuntimeError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise StartError(
                f"HCCL does not link rank {rank} with the other {size - 1} ({reason}); look at runtime check doctor, "
                "at the others' NPUs in npu-smi info, and at HCCL_SOCKET_IFNAME and HCCL_CONNECT_TIMEOUT"
            ) from error

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(out.flatten(0, 1), x.contiguous())
        return torch.cat(out.unbind(), dim=dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x) // self.size, *x.shape[1:])
        dist.reduce_scatter_tensor(out, x.contiguous())
        return out

    def all_to_all(self, x: Tensor, sent: list[int] | None = None, came: list[int] | None = None) -> Tensor:
        out = x.new_empty(len(x) if came is None else sum(came), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), came, sent)
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x

    def close(self) -> None:
        dist.destroy_process_group()


def group_name(rank: int) -> str:
    """HCCL's name of the ranks, for operators that exchange by themselves."""
    group: Any = dist.group.WORLD
    return str(group._get_backend(torch.device("npu")).get_hccl_comm_name(rank))

"""Exchange between the cards of one model: NCCL through torch.distributed, on the stream of the step."""

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.devices.cuda.symmetric_memory import SymmetricSums
from runtime.devices.rendezvous import Rendezvous


class Nccl:
    """Ranks of one start, which meet at a file (`rendezvous`) that none of an earlier start has used."""

    def __init__(
        self, rank: int, size: int, rendezvous: str, torch_device: torch.device, *, shares: bool = False
    ) -> None:
        """`shares`: small sums go through memory that the cards share."""
        self.rank = rank
        self.size = size
        store = dist.FileStore(rendezvous, size)
        self.outcomes = Rendezvous(store, rank, size).outcomes
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=torch_device)
        self.sums = SymmetricSums.open(dist.group.WORLD.group_name, size, torch_device) if shares else None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.sums is not None and (found := self.sums.sum(x)) is not None:
            return found
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(parts, x.contiguous())
        return torch.cat(parts.unbind(), dim=dim)

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

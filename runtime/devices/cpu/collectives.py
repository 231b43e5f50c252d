"""Exchange between ranks on the cpu: gloo through torch.distributed."""

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.devices.rendezvous import Rendezvous


class Gloo:
    """Ranks of one start, which meet at a file (`rendezvous`) that none of an earlier start has used."""

    def __init__(self, rank: int, size: int, rendezvous: str) -> None:
        self.rank = rank
        self.size = size
        store = dist.FileStore(rendezvous, size)
        self.outcomes = Rendezvous(store, rank, size).outcomes
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank].clone()  # gloo has no kernel of its own for it

    def all_to_all(self, x: Tensor, sent: list[int] | None = None, came: list[int] | None = None) -> Tensor:
        out = x.new_empty(len(x) if came is None else sum(came), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), came, sent)
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x

    def close(self) -> None:
        dist.destroy_process_group()

"""Collectives over torch.distributed, which every torch device with several ranks builds on."""

from collections.abc import Callable, Sequence
from copy import copy
from datetime import timedelta
from typing import Self, cast
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.devices.attention_ranks import AttentionRanks
from runtime.devices.base import Collectives
from runtime.devices.rendezvous import MEET_TIMEOUT_S, TIMEOUT_S, Rendezvous
from runtime.devices.single_rank import SingleRank
from runtime.devices.torch_stages import StageGroups, TorchStageLinks
from runtime.messages.ranks import StartRank


class TorchCollectives:
    """Collectives (devices/base.py) of the ranks of one start, or of one of its stages. A device's own class
    adds what differs."""

    def __init__(
        self,
        backend: str,
        rank: int,
        size: int,
        rendezvous: str,
        torch_device: torch.device | None = None,
        *,
        num_stages: int = 1,
    ) -> None:
        """`backend` is torch's name of it: gloo, nccl, hccl. Rank `rank` of `num_stages` stages of `size`
        ranks; all of them meet at `rendezvous` (`open_store`). `torch_device` binds the process group to a
        device, where the backend profits from it."""
        self.meanwhile: Callable[[], None] | None = None
        self.rank = rank % size
        self.size = size
        total = size * num_stages
        store = open_store(rendezvous, rank, total)
        self._rendezvous = Rendezvous(store, rank, total)
        self._rendezvous.meet()
        # a collective may wait for a rank that compiles for minutes; the server finds one that hangs
        # (--watchdog-timeout), and ends all of them
        limit = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=total, timeout=limit, device_id=torch_device
        )
        self.stages = StageGroups(rank, size, num_stages) if num_stages > 1 else None
        # None: all ranks
        self.group = None if self.stages is None else self.stages.of_stage

    @property
    def is_async(self) -> bool:
        """Whether collectives return while they are under way, for `wait`."""
        return self.meanwhile is not None

    def wait(self, work: dist.Work | None) -> None:
        """Calls `meanwhile`, and returns when the collective is done; on a device with streams its stream
        waits. None: it was not asynchronous."""
        if work is not None:
            assert self.meanwhile is not None, "an asynchronous collective with nothing to compute meanwhile"
            self.meanwhile()
            work.wait()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        self.wait(dist.all_reduce(x, group=self.group, async_op=self.is_async))
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' equally shaped tensors joined along `dim` in rank order."""
        parts, x = x.new_empty(self.size, *x.shape), x.contiguous()
        target = parts.flatten(0, 1) if x.dim() else parts
        self.wait(dist.all_gather_into_tensor(target, x, self.group, self.is_async))
        return torch.cat(parts.unbind(), dim=dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sum over ranks, [len(x) / size, ...]."""
        out, x = x.new_empty(len(x) // self.size, *x.shape[1:]), x.contiguous()
        self.wait(dist.reduce_scatter_tensor(out, x, group=self.group, async_op=self.is_async))
        return out

    def all_to_all(
        self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> Tensor:
        """Rows of `x` to each rank, and the rows that came from each, in rank order; equally many, or `sent`
        and `received` rows."""
        out, x = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:]), x.contiguous()
        self.wait(dist.all_to_all_single(out, x, received, sent, self.group, self.is_async))
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x` on every rank, in place."""
        dist.broadcast(x, group=self.group, group_src=0)
        return x

    def among(self, parts: Sequence[range]) -> Self | SingleRank:
        """Collectives of the ranks of that part which this rank is in. `parts` divide the ranks of a stage;
        all ranks of all stages call it with the same ones. Outcomes are still those of all ranks."""
        count = 1 if self.stages is None else self.stages.stage.count
        index = 0 if self.stages is None else self.stages.stage.index
        own: Self | SingleRank = self
        for stage in range(count):
            for part in parts:
                if len(part) == self.size:  # all ranks of the stage
                    continue
                is_here = stage == index and self.rank in part
                if len(part) == 1:
                    own = SingleRank() if is_here else own
                    continue
                group = dist.new_group([stage * self.size + rank for rank in part])
                if is_here:
                    own = self._of_group(cast(dist.ProcessGroup, group), part)
        return own

    def _of_group(self, group: dist.ProcessGroup, part: range) -> Self:
        """Collectives among the ranks `part` of this stage alone, which `group` is the process group of."""
        own = copy(self)
        own.rank, own.size, own.group = part.index(self.rank), len(part), group
        return own

    def outcomes(self, mine: str) -> list[str]:
        """The outcome that each rank of all stages reports, "" or an error. Raises Stranded."""
        return self._rendezvous.outcomes(mine)

    def close(self) -> None:
        """Ends the process group."""
        dist.destroy_process_group()


def open_store(rendezvous: str, rank: int, size: int) -> dist.Store:
    """The store at which the ranks of one start meet: a file that no earlier start has used, or, with ranks
    on several nodes, tcp://HOST:PORT/PREFIX?fd=N. Rank 0 then serves it on the socket that it has inherited
    as descriptor N, and all keys begin with the prefix, which only these ranks know."""
    if not rendezvous.startswith("tcp:"):
        return dist.FileStore(rendezvous, size)
    url = urlsplit(rendezvous)
    served = {"is_master": True, "master_listen_fd": int(parse_qs(url.query)["fd"][0])} if rank == 0 else {}
    limit = timedelta(seconds=MEET_TIMEOUT_S)
    address = str(url.hostname), int(url.port or 0)
    store = dist.TCPStore(*address, size, wait_for_workers=False, timeout=limit, **served)
    return dist.PrefixStore(url.path.removeprefix("/"), store)


def open_links(ranks: TorchCollectives, torch_device: torch.device, in_flight: int) -> TorchStageLinks | None:
    """Links to the other stages; None: there is one stage. `in_flight`: steps, at most."""
    return None if ranks.stages is None else TorchStageLinks(ranks.stages, torch_device, in_flight)


def open_attention_ranks(ranks: Collectives, start: StartRank) -> AttentionRanks | None:
    """Collectives of the ranks that attention divides otherwise than all layers; None: it does not."""
    layout = start.attention_layout
    if not layout.is_divided:
        return None
    assert isinstance(ranks, TorchCollectives), "several ranks"
    return AttentionRanks(
        layout,
        heads=ranks.among(layout.head_ranks()),
        parts=ranks.among(layout.part_ranks()),
        group=ranks.among(layout.group_ranks()),
        peers=ranks.among(layout.peer_ranks()),
        has_own_head=start.has_group_heads,
    )

"""Which place of an expert computes a token, for layers whose experts have copies or move between ranks."""

import torch
from torch import Tensor

from runtime.layers.weight import Shard
from runtime.messages.experts import Dispatch, Placement


class ExpertTable:
    """The places of each expert of a layer, on the device: their tensors stay where they are when experts
    move, so that captured graphs go on."""

    def __init__(
        self,
        num_experts: int,
        placement: Placement,
        dispatch: Dispatch,
        torch_device: torch.device,
        local: Shard,
        rank: int | None,
    ) -> None:
        """`local`: this rank's places; `rank`: its number where each rank has tokens of its own; None: all
        ranks have the same tokens, and choose alike."""
        self.dispatch, self.local, self.rank = dispatch, local, rank
        width = len(placement) - num_experts + 1  # the most places that one expert can have
        self.table = torch.zeros(num_experts, width, dtype=torch.int64, device=torch_device)
        self.counts = torch.ones(num_experts, dtype=torch.int64, device=torch_device)  # places of each expert
        self.preferred = torch.zeros(num_experts, dtype=torch.int64, device=torch_device)
        self.set(placement)

    def set(self, placement: Placement) -> None:
        """Takes another placement into use, of as many places."""
        places: list[list[int]] = [[] for _ in range(len(self.counts))]
        for place, expert in enumerate(placement):
            places[expert].append(place)
        width = self.table.shape[1]
        own = range(self.local.start, self.local.start + self.local.size)
        rank = self.rank or 0
        preferred = [next((p for p in some if p in own), some[rank % len(some)]) for some in places]
        self.table.copy_(torch.tensor([some + [0] * (width - len(some)) for some in places]))
        self.counts.copy_(torch.tensor([len(some) for some in places]))
        self.preferred.copy_(torch.tensor(preferred))

    def places(self, ids: Tensor) -> Tensor:
        """Expert ids, integers [T, k] -> the places that compute them, of the same shape. Ids below 0 stay.

        The tokens of an expert go to its places in turn; with `static` a rank that has tokens of its own
        sends them to one, its own where it has it. `fake` spreads tokens over all places, whatever their
        experts are.
        """
        known, rows = ids.clamp(min=0).long(), torch.arange(len(ids), device=ids.device).unsqueeze(1)
        if self.dispatch == "fake":
            choices = torch.arange(ids.shape[1], device=ids.device)
            found = (rows * ids.shape[1] + choices) % self.local.full
        elif self.dispatch == "static" and self.rank is not None:
            found = self.preferred[known]
        else:
            found = self.table[known, (rows + (self.rank or 0)) % self.counts[known]]
        return torch.where(ids < 0, ids, found)

"""Data-parallel attention: each group of ranks has tokens of its own in attention, and all ranks share the
other layers. So the tokens of all groups are joined before such a layer, and divided behind it.

Ranks exchange tokens with their peers, the ranks at the same place of the other groups, in tensors as long
as those of the group with the most tokens. What fills up the others is dropped before anything is computed.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.devices.attention_ranks import AttentionRanks
from runtime.devices.base import Device


class GroupTokens:
    """Joins and divides tensors with a row for each token. `counts`: rows of each group, the same on all
    ranks; `T`: their sum."""

    def __init__(self, ranks: AttentionRanks) -> None:
        self.ranks = ranks

    def join(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        """The rows of all groups, in their order: this group's [own, ...] -> [T, ...]."""
        most = max(counts)
        if not most:
            return x
        parts = self.ranks.peers.all_gather(_filled(x, most), 0)
        if min(counts) == most:
            return parts
        return torch.cat([part[:count] for part, count in zip(parts.split(most), counts, strict=True)])

    def own(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        """This group's rows: [T, ...] -> [own, ...]."""
        index = self.ranks.index
        first = sum(counts[:index])
        return x[first : first + counts[index]]

    def sum(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        """This group's rows of the sum over all ranks: [T, ...] -> [own, ...]."""
        most = max(counts)
        if not most:
            return x
        if min(counts) < most:
            x = torch.cat([_filled(part, most) for part in x.split(list(counts))])
        total = self.ranks.group.all_reduce(self.ranks.peers.reduce_scatter(x))
        return total[: counts[self.ranks.index]]


def _filled(x: Tensor, most: int) -> Tensor:
    """[n, ...] -> [most, ...], zeros behind the rows."""
    more = most - len(x)
    return pad(x, (0, 0) * (x.dim() - 1) + (0, more)) if more else x


def open_group_tokens(device: Device) -> GroupTokens | None:
    """None: all ranks have the same tokens."""
    return GroupTokens(device.attention) if device.attention is not None and device.has_groups else None

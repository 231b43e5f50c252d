"""Data-parallel attention: each group of ranks has tokens of its own in attention, and all ranks share the
other layers. So the tokens of all groups are joined before such a layer, and divided behind it.

Ranks exchange tokens with their peers, the ranks at the same place of the other groups, in tensors as long
as those of the group with the most tokens. What fills up the others is dropped before anything is computed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.devices.attention_ranks import AttentionRanks
from runtime.devices.base import Device, ForwardBatch
from runtime.layers.linear import Given, Linear, LinearUse
from runtime.layers.parallel.sequence_parallel import all_tokens, open_sequence_parallel
from runtime.layers.weight import Layer


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


def _mark(layers: Iterable[Layer], given: Given) -> None:
    """Tells the linear layers below `layers` which tokens they are given, for adapters of these."""
    for layer in layers:
        if isinstance(layer, Linear | LinearUse):
            layer.given = given
        else:
            _mark([child for _, child in layer.children() if isinstance(child, Layer)], given)


def _filled(x: Tensor, most: int) -> Tensor:
    """[n, ...] -> [most, ...], zeros behind the rows."""
    more = most - len(x)
    return pad(x, (0, 0) * (x.dim() - 1) + (0, more)) if more else x


class SharedTokens:
    """The tokens of a feed-forward that all ranks share: those of all groups, and of all ranks' shards where
    each has a shard of the tokens between attentions."""

    def __init__(
        self, device: Device, layers: Iterable[Layer], *, is_apart: bool = False, is_summed: bool = False
    ) -> None:
        """`layers`: what is given these tokens; `is_apart`: it is given this rank's own, whatever other ranks
        have; `is_summed`: what it returns where there are groups is a sum over ranks already."""
        self.groups = None if is_apart else open_group_tokens(device)
        self.sequence_parallel = None if is_apart else open_sequence_parallel(device)
        self.is_summed = is_summed
        if self.groups is not None:
            _mark(layers, "all")
        elif is_apart and device.scatters_tokens:
            _mark(layers, "shard")

    def join(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """This rank's tokens [own, hidden] -> what the layer is given, [T, hidden]."""
        if self.sequence_parallel is not None:  # a compiled layer is one function for any batch
            x = all_tokens(self.sequence_parallel, x, len(batch.positions))
        return x if self.groups is None else self.groups.join(x, batch.group_tokens)

    def divide(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """What the layer returns -> of this rank's tokens, [own, hidden]."""
        if self.groups is None:
            return x  # the layer's own reduction gave each rank what it needs
        divide = self.groups.own if self.is_summed else self.groups.sum
        x = divide(x, batch.group_tokens)
        return x if self.sequence_parallel is None else self.sequence_parallel.shard(x)


def open_group_tokens(device: Device) -> GroupTokens | None:
    """None: all ranks have the same tokens."""
    return GroupTokens(device.attention) if device.attention is not None and device.has_groups else None

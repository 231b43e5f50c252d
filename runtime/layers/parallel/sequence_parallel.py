"""Sequence parallelism (Korthikanti et al., 2022): the tokens of a step in equal shards, one for each rank.

What is computed for each token by itself between attentions, norms above all, is then computed once and not
on every rank. The all-reduce at the end of a half layer becomes a reduce-scatter, and an all-gather brings
the tokens together where all of them are needed; the two cost as much as the all-reduce did.

The last shards are filled up with padding rows, or are nothing but padding.
"""

from torch import Tensor
from torch.nn.functional import pad

from runtime.devices.base import Collectives, Device


class SequenceParallel:
    """Shards and gathers the tokens of a step. `T`: tokens of the step, `P` = ceil(T / ranks): rows of a
    shard."""

    def __init__(self, ranks: Collectives) -> None:
        self.ranks = ranks

    def shard_size(self, num_tokens: int) -> int:
        """Rows of a shard, P."""
        return -(-num_tokens // self.ranks.size)

    def num_real_rows(self, num_tokens: int) -> int:
        """Rows of this rank's shard that are tokens, not padding."""
        size = self.shard_size(num_tokens)
        return min(size, max(0, num_tokens - self.ranks.rank * size))

    def shard(self, x: Tensor) -> Tensor:
        """This rank's shard of a tensor that all ranks have: [T, hidden] -> [P, hidden]."""
        size = self.shard_size(len(x))
        return self.padded(x)[self.ranks.rank * size : (self.ranks.rank + 1) * size]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's shard of the sum over ranks: [T, hidden] -> [P, hidden]."""
        return self.ranks.reduce_scatter(self.padded(x))

    def all_gather(self, x: Tensor, num_tokens: int) -> Tensor:
        """The tokens of all shards: [P, hidden] -> [T, hidden]."""
        return self.ranks.all_gather(x, 0)[:num_tokens]

    def padded(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [P * ranks, hidden], zeros behind the tokens."""
        more = self.shard_size(len(x)) * self.ranks.size - len(x)
        return pad(x, (0, 0, 0, more)) if more else x

    def mask_padding(self, ids: Tensor, num_tokens: int) -> Tensor:
        """Expert ids [P, k] of a shard, -1 (no expert) for padding rows. May overwrite `ids`."""
        real = self.num_real_rows(num_tokens)
        if real < len(ids):
            ids[real:] = -1
        return ids


def open_sequence_parallel(device: Device) -> SequenceParallel | None:
    """None: each rank has all tokens of its group, between attentions too."""
    return SequenceParallel(device.group_ranks) if device.scatters_tokens else None


def sum_of_ranks(device: Device, x: Tensor) -> Tensor:
    """What a feed-forward returns that all ranks share, of their partial sums x [T, hidden]: the sum, or this
    rank's shard of it, [P, hidden]. With attention groups x itself, which the layer adds up."""
    if device.has_groups:
        return x
    if device.scatters_tokens:
        return SequenceParallel(device.collectives).reduce_scatter(x)
    return device.collectives.all_reduce(x)


def all_tokens(parallel: SequenceParallel | None, x: Tensor, num_tokens: int) -> Tensor:
    """[T, hidden] of all tokens: x itself, or gathered where x is this rank's shard [P, hidden]."""
    return x if parallel is None else parallel.all_gather(x, num_tokens)

"""The tokens of a step in equal parts, one for each rank: what is done to each token for itself between
attentions, norms above all, is then done once and not on every rank (sequence parallelism, Korthikanti et
al., 2022). The sum over ranks that ends a layer half becomes a reduce-scatter, and an all-gather brings the
tokens together where all of them are wanted; the two cost what the sum did.

The last parts are filled up with rows that are nobody's, or are nothing but such rows.
"""

from torch import Tensor
from torch.nn.functional import pad

from runtime.devices.base import Collectives


class Parts:
    """Of the steps of one rank. `T` tokens in a step, `P` = ceil(T / ranks) in a part."""

    def __init__(self, ranks: Collectives) -> None:
        self.ranks = ranks

    def size(self, num_tokens: int) -> int:
        """P"""
        return -(-num_tokens // self.ranks.size)

    def own(self, num_tokens: int) -> int:
        """Rows of this rank's part that are tokens."""
        size = self.size(num_tokens)
        return min(size, max(0, num_tokens - self.ranks.rank * size))

    def cut(self, x: Tensor) -> Tensor:
        """This rank's part of [T, hidden], the same on all ranks -> [P, hidden]"""
        size = self.size(len(x))
        return self.filled(x)[self.ranks.rank * size : (self.ranks.rank + 1) * size]

    def sum(self, x: Tensor) -> Tensor:
        """This rank's part of the sum over ranks: [T, hidden] -> [P, hidden]"""
        return self.ranks.reduce_scatter(self.filled(x))

    def join(self, x: Tensor, num_tokens: int) -> Tensor:
        """All parts: [P, hidden] -> [T, hidden]"""
        return self.ranks.all_gather(x, 0)[:num_tokens]

    def filled(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [P * ranks, hidden]"""
        more = self.size(len(x)) * self.ranks.size - len(x)
        return pad(x, (0, 0, 0, more)) if more else x

    def hide(self, ids: Tensor, num_tokens: int) -> Tensor:
        """Experts [P, k] of a part, with none for rows that are nobody's; may overwrite `ids`."""
        own = self.own(num_tokens)
        if own < len(ids):
            ids[own:] = -1
        return ids

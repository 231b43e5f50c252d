"""Tokens of attention groups, joined and divided by one rank of three groups."""

import pytest
import torch
from torch import Tensor

from runtime.devices.attention_ranks import AttentionRanks
from runtime.devices.single_rank import SingleRank
from runtime.layers.parallel.group_tokens import GroupTokens
from runtime.messages.attention_layout import AttentionLayout


class Peers(SingleRank):
    """One rank of each group; what the others send is known."""

    size = 3

    def __init__(self, rank: int, sent: list[Tensor]) -> None:
        self.rank = rank
        self.sent = sent

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        assert dim == 0 and x.equal(self.sent[self.rank])
        return torch.cat(self.sent)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The others send the same."""
        return 3 * x.chunk(3)[self.rank]


@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 3, 2), (0, 0, 4), (0, 0, 0)])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rows_of_all_groups_and_back(counts: tuple[int, ...], rank: int) -> None:
    rows = [torch.rand(count, 5) for count in counts]
    sent = [torch.cat((part, torch.zeros(max(counts) - len(part), 5))) for part in rows]
    peers = Peers(rank, sent)
    tokens = GroupTokens(
        AttentionRanks(AttentionLayout(3, 3), SingleRank(), SingleRank(), SingleRank(), peers)
    )
    joined = tokens.join(rows[rank], counts)
    assert joined.equal(torch.cat(rows))
    assert tokens.own(joined, counts).equal(rows[rank])
    assert tokens.sum(joined, counts).equal(3 * rows[rank])

"""How attention divides ranks."""

import pytest

from runtime.messages.attention_layout import AttentionLayout


@pytest.mark.parametrize(("groups", "parts"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (8, 1), (1, 8)])
def test_every_rank_is_once_in_each_kind_of_set(groups: int, parts: int) -> None:
    layout = AttentionLayout(8, groups, parts)
    sets = (layout.head_ranks(), layout.part_ranks(), layout.group_ranks(), layout.peer_ranks())
    sizes = (8 // groups // parts, parts, 8 // groups, groups)
    for kind, size in zip(sets, sizes, strict=True):
        assert sorted(rank for one in kind for rank in one) == list(range(8))
        assert {len(one) for one in kind} == {size}
    for rank in range(8):
        heads, part, group, peers = (next(one for one in kind if rank in one) for kind in sets)
        assert set(heads) & set(part) == {rank} == set(group) & set(peers)
        assert {*heads, *part} <= {*group}
        assert layout.group_of(rank) == peers.index(rank) == rank // layout.group_size


def test_ranks_are_numbered_by_group_then_part_then_head() -> None:
    layout = AttentionLayout(8, 2, 2)
    assert layout.head_ranks() == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert [list(part) for part in layout.part_ranks()] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.group_ranks() == [range(0, 4), range(4, 8)]
    assert [list(peers) for peers in layout.peer_ranks()] == [[0, 4], [1, 5], [2, 6], [3, 7]]

"""What each rank has of heads and channels."""

import pytest

from runtime.errors import ModelError
from runtime.layers.weight import Shard, channel_shard, even_shard, head_shards, unit_shard
from runtime.models.config.shares import (
    FEWEST_RUNS,
    Part,
    channel_part,
    even_part,
    head_parts,
    most_channels,
    most_heads,
)
from tests.devices.cpu.places import Ranks

# published models: (query heads, key/value heads)
HEADS = [(14, 2), (9, 3), (28, 4), (12, 2), (40, 10), (64, 8), (25, 5), (5, 5), (15, 1), (71, 1), (10, 10)]


def covered(parts: list[Part]) -> list[int]:
    """All entries that some rank has."""
    return sorted({i for part in parts for i in range(part.start, part.start + part.size)})


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_queries_are_with_their_keys(heads: int, kv_heads: int, ranks: int) -> None:
    parts = [head_parts(heads, kv_heads, ranks, rank) for rank in range(ranks)]
    assert sum(q.size for q, _ in parts) == heads == len(covered([q for q, _ in parts]))
    assert covered([kv for _, kv in parts]) == list(range(kv_heads))
    for q, kv in parts:
        each, group = q.size // kv.size, heads // kv_heads
        assert q.size == each * kv.size > 0, "attention maps equally many queries to each key"
        needed = {head // group for head in range(q.start, q.start + q.size)}
        assert needed == set(range(kv.start, kv.start + kv.size))
    most = max(q.size for q, _ in parts), max(kv.size for _, kv in parts)
    assert most == most_heads(heads, kv_heads, ranks) == tuple(part.size for part in parts[0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("full", [8, 9, 45, 64, 90, 96, 1408, 2880, 4864, 8960, 11008, 18944, 29568])
def test_channels_are_divided_in_runs(full: int, ranks: int) -> None:
    parts = [channel_part(full, ranks, rank) for rank in range(ranks)]
    assert [part.start for part in parts[1:]] == [part.start + part.size for part in parts[:-1]]
    assert parts[0].start == 0 and parts[-1].start + parts[-1].size == full
    assert all(part.size > 0 for part in parts)
    assert max(part.size for part in parts) == most_channels(full, ranks) == parts[0].size
    if full % (8 * ranks) == 0:
        assert len({part.size for part in parts}) == 1
    if full >= 2 * ranks:
        assert all(part.start % 2 == 0 for part in parts), "or a rank would have half a byte of 4 bits"
    if full >= 8 * FEWEST_RUNS * ranks:
        assert all(part.start % 8 == 0 for part in parts), "or half a word of them"
        assert parts[0].size <= full / ranks * (1 + 1 / FEWEST_RUNS)


def test_groups_of_quantized_weights_stay_whole() -> None:
    """An inner size of 18944, as 7B models have, in groups of 128."""
    assert all(channel_part(18944, 3, rank).start % 128 == 0 for rank in range(3))
    assert [channel_part(4864, 3, rank).size for rank in range(3)] == [1664, 1600, 1600]


def test_parts_of_units() -> None:
    assert [even_part(10, 4, rank).size for rank in range(4)] == [3, 3, 2, 2]
    assert [even_shard(12, Ranks(r, 4), "heads") for r in range(4)] == [Shard(12, 3 * r, 3) for r in range(4)]
    assert [unit_shard(5, Ranks(r, 2), "heads") for r in range(2)] == [Shard(5, 0, 3), Shard(5, 3, 2)]
    assert [head_shards(4, 2, Ranks(r, 4))[1].start for r in range(4)] == [0, 0, 1, 1]
    assert [head_shards(3, 3, Ranks(r, 2))[0] for r in range(2)] == [Shard(3, 0, 2), Shard(3, 2, 1)]


def test_no_rank_is_without() -> None:
    with pytest.raises(ModelError, match=r"--tp-size 4 leaves ranks without any of the model's heads \(3\)"):
        unit_shard(3, Ranks(0, 4), "heads")
    with pytest.raises(ModelError, match=r"--tp-size 8 .* attention heads \(6\); lower it"):
        head_shards(6, 2, Ranks(0, 8))
    with pytest.raises(ModelError, match="--tp-size 8 .* inner size"):
        channel_shard(7, Ranks(0, 8), "inner size")

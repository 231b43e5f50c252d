"""How the ranks of tensor parallelism divide heads, channels and inner sizes. Torch-free.

Nothing is padded: where a number does not divide, some ranks have less. Rank 0 has the most of everything, so
what it holds bounds what any rank does.
"""

from typing import NamedTuple

# Channels are divided in runs of as many: products stay aligned, and what quantized weights have together
# stays whole, as groups with one scale and eight codes of 4 bits in a word
CHANNEL_RUNS = (256, 128, 64, 32, 16, 8)
FEWEST_RUNS = 16  # of each rank: the largest part is then longer than the mean by a sixteenth at most


class Part(NamedTuple):
    """A rank's range [start, start + size) of a dimension."""

    start: int
    size: int


def even_part(full: int, ranks: int, rank: int = 0) -> Part:
    """Parts that differ by one at most, the longer ones first."""
    size, more = divmod(full, ranks)
    return Part(rank * size + min(rank, more), size + (rank < more))


def channel_part(full: int, ranks: int, rank: int = 0) -> Part:
    """Equal parts of whole runs of 8 where the ranks divide `full` so, else the longest of CHANNEL_RUNS of
    which each rank has enough. What is too small for that is divided in twos."""
    long = next((run for run in CHANNEL_RUNS if full >= FEWEST_RUNS * run * ranks), 0)
    if full % (8 * ranks) == 0 or (not long and full % (2 * ranks) == 0):
        return even_part(full, ranks, rank)
    run = long or min(2, full // ranks) or 1
    runs = even_part(-(-full // run), ranks, rank)
    start = min(full, runs.start * run)
    return Part(start, min(full - start, runs.size * run))


def head_parts(heads: int, kv_heads: int, ranks: int, rank: int = 0) -> tuple[Part, Part]:
    """Query heads and key/value heads of a rank. Each key/value head serves `heads // kv_heads` query heads,
    and a rank has all that its queries need: whole groups, or a part of one group where there are fewer
    key/value heads than ranks, which then have copies of them."""
    group = heads // kv_heads
    if kv_heads >= ranks:
        kv = even_part(kv_heads, ranks, rank)
        return Part(kv.start * group, kv.size * group), kv
    # the last heads have more ranks than the first, so that rank 0 has the largest part of a group
    owners = [kv_heads - 1 - (ranks - 1 - one) * kv_heads // ranks for one in range(ranks)]
    head = owners[rank]
    part = even_part(group, owners.count(head), rank - owners.index(head))
    return Part(head * group + part.start, part.size), Part(head, 1)


def most_channels(full: int, ranks: int) -> int:
    """Channels of the rank that has most."""
    return channel_part(full, ranks).size


def most_heads(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """Query heads and key/value heads of the rank that has most of them."""
    queries, kv = head_parts(heads, kv_heads, ranks)
    return queries.size, kv.size

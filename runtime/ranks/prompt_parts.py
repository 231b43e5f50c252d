"""The parts into which ranks with the same heads divide the prompts of a step (context parallelism).

A token attends to all before it, so the later ones cost more. Either way of dividing gives each of the C
ranks the same work, but for a few tokens:

    in-seq-split        2 C blocks of consecutive tokens; rank r has blocks r and 2 C - 1 - r
                        (zigzag: what an early block costs less, a late one costs more)
    round-robin-split   token i of the step goes to rank i mod C

Blocks are rows that any kernel attends to. Tokens dealt in turn need attention that knows of strides between
the positions of a row (AttentionRows.strides).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.base import Collectives
from runtime.layers.parallel.context_parallel import TokenPart
from runtime.layers.upload import upload_int64
from runtime.messages.prompt_split import PromptSplit


class Run(NamedTuple):
    """Tokens `first`, `first + stride`, ... of a row, `size` of them."""

    first: int
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank computes of a step's queries: these tokens, int64 [P] rising, as these rows."""

    tokens: np.ndarray
    rows: AttentionRows


def runs_of(split: PromptSplit, begin: int, count: int, num_parts: int, part: int) -> Iterator[Run]:
    """The tokens of a row of `count`, whose first is the step's token `begin`, that a part has."""
    if split == "round-robin-split":
        first = (part - begin) % num_parts
        if first < count:
            yield Run(first, -(-(count - first) // num_parts), num_parts)
        return
    bounds = [count * block // (2 * num_parts) for block in range(2 * num_parts + 1)]
    early, late = part, 2 * num_parts - 1 - part
    blocks = [(bounds[early], bounds[early + 1]), (bounds[late], bounds[late + 1])]
    if blocks[0][1] == blocks[1][0]:  # nothing lies between them
        blocks = [(blocks[0][0], blocks[1][1])]
    yield from (Run(start, end - start, 1) for start, end in blocks if start < end)


def divide(rows: AttentionRows, num_whole: int, num_parts: int, split: PromptSplit) -> list[RankPart] | None:
    """The part of each rank: the first `num_whole` rows are in all of them, the other ones are divided.
    None: some rank would have nothing of what is divided, so that all compute everything alike."""
    counts = rows.counts.astype(np.int64)
    begins = counts.cumsum() - counts
    parts = []
    for part in range(num_parts):
        runs = [(row, Run(0, int(counts[row]), 1)) for row in range(num_whole)]
        for row in range(num_whole, len(counts)):
            begin, count = int(begins[row]), int(counts[row])
            runs += [(row, run) for run in runs_of(split, begin, count, num_parts, part)]
        if len(runs) == num_whole:
            return None
        parts.append(_rank_part(rows, begins, runs))
    return parts


def _rank_part(rows: AttentionRows, begins: np.ndarray, runs: list[tuple[int, Run]]) -> RankPart:
    of = np.array([row for row, _ in runs])
    firsts, counts, strides = np.array([run for _, run in runs], np.int64).T
    tokens = np.concatenate([begins[row] + run.first + run.stride * np.arange(run.size) for row, run in runs])
    return RankPart(
        tokens,
        AttentionRows(
            rows.num_decodes,
            rows.slots[of],
            rows.starts[of] + firsts,
            counts.astype(np.int32),
            rows.parents,  # of whole rows, which come first
            strides.astype(np.int32) if (strides > 1).any() else None,
        ),
    )


def open_part(
    ranks: Collectives, split: PromptSplit, rows: AttentionRows, num_whole: int, torch_device: torch.device
) -> tuple[TokenPart, AttentionRows] | None:
    """This rank's part of a step, of those of `ranks`, and its rows; None: the step is not divided."""
    parts = divide(rows, num_whole, ranks.size, split)
    if parts is None:
        return None
    num_tokens, num_common = int(rows.counts.sum()), int(rows.counts[:num_whole].sum())
    largest = max(len(part.tokens) for part in parts) - num_common
    places = np.empty(num_tokens - num_common, np.int64)
    for rank, part in enumerate(parts):
        divided = part.tokens[num_common:] - num_common
        places[divided] = rank * largest + np.arange(len(divided))
    own = parts[ranks.rank]
    indices, joined = (upload_int64(found, torch_device) for found in (own.tokens, places))
    return TokenPart(ranks, num_common, indices, largest, joined), own.rows

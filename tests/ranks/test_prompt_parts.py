"""Prompts in parts: who computes which queries, what that costs, and that nothing of the results changes."""

from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cpu.attention_plan import CpuAttentionPlan
from runtime.devices.cpu.facts import FACTS
from runtime.devices.cpu.mla import Up, attend_latents
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.single_rank import SingleRank
from runtime.layers.attention import sdpa
from runtime.layers.attention.sparse_latents import SparseLatents
from runtime.messages.prompt_split import PromptSplit
from runtime.ranks.prompt_parts import divide, open_part, runs_of

SPLITS = get_args(PromptSplit)
PAGE = 4
MANY = pytest.mark.parametrize("split", SPLITS)


def rows_of(*rows: tuple[int, int], num_decodes: int = 0) -> AttentionRows:
    """Rows (tokens before, queries), each in a slot of its own."""
    starts, counts = np.array(rows, np.int64).T
    slots = np.random.default_rng(3).permutation(len(rows)).astype(np.int32)
    return AttentionRows(num_decodes, slots, starts, counts.astype(np.int32))


MIXED = rows_of((37, 1), (5, 1), (11, 3), (0, 300), (45, 1), (17, 29), (600, 8), num_decodes=2)
NUM_WHOLE = 3  # rows of MIXED


def queries_of(rows: AttentionRows) -> list[tuple[int, int]]:
    """(slot, position) of all queries of rows."""
    strides = np.ones(len(rows.slots), int) if rows.strides is None else rows.strides
    return [
        (int(slot), int(start + i * stride))
        for slot, start, count, stride in zip(rows.slots, rows.starts, rows.counts, strides, strict=True)
        for i in range(count)
    ]


def test_blocks_are_two_for_each_part() -> None:
    blocks = [list(runs_of("in-seq-split", 7, 16, 2, part)) for part in range(2)]
    assert blocks == [[(0, 4, 1), (12, 4, 1)], [(4, 8, 1)]], "the two in the middle are one"
    assert [list(runs_of("in-seq-split", 0, 3, 2, part)) for part in range(2)] == [[(2, 1, 1)], [(0, 2, 1)]]


def test_tokens_are_dealt_in_turn() -> None:
    assert [list(runs_of("round-robin-split", 4, 5, 3, part)) for part in range(3)] == [
        [(2, 1, 3)],
        [(0, 2, 3)],
        [(1, 2, 3)],
    ]


@MANY
@pytest.mark.parametrize("num_parts", [2, 3, 4])
def test_each_query_is_in_one_part_and_whole_rows_are_in_all(split: PromptSplit, num_parts: int) -> None:
    parts = divide(MIXED, NUM_WHOLE, num_parts, split)
    assert parts is not None
    everything, num_common = queries_of(MIXED), int(MIXED.counts[:NUM_WHOLE].sum())
    divided: list[int] = []
    for part in parts:
        tokens = part.tokens.tolist()
        assert tokens == sorted(tokens) and tokens[:num_common] == list(range(num_common))
        assert queries_of(part.rows) == [everything[token] for token in tokens]
        assert part.rows.num_decodes == MIXED.num_decodes
        divided += tokens[num_common:]
    assert sorted(divided) == list(range(num_common, len(everything)))


@MANY
@pytest.mark.parametrize("num_parts", [2, 4, 8])
@pytest.mark.parametrize("start", [0, 5000])
def test_parts_of_a_long_prompt_cost_the_same(split: PromptSplit, num_parts: int, start: int) -> None:
    """Products of queries and keys, which are what the attention of a long prompt costs."""
    rows = rows_of((start, 4096))
    whole = sum(position + 1 for _, position in queries_of(rows))
    parts = divide(rows, 0, num_parts, split)
    assert parts is not None
    for part in parts:
        cost = sum(position + 1 for _, position in queries_of(part.rows))
        assert cost / whole == pytest.approx(1 / num_parts, rel=0.003)


@MANY
def test_a_step_that_leaves_a_rank_without_queries_is_not_divided(split: PromptSplit) -> None:
    assert divide(rows_of((9, 1), num_decodes=0), 0, 2, split) is None
    assert divide(rows_of((3, 1), (9, 2), num_decodes=1), 1, 3, split) is None


class Joined(SingleRank):
    """One of several ranks, which all gather what was laid before."""

    def __init__(self, rank: int, size: int, parts: list[Tensor]) -> None:
        self.rank, self.size, self.parts = rank, size, parts

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if len(self.parts) < self.size:
            self.parts.append(x)
            return torch.cat([x] * self.size, dim)
        assert torch.equal(self.parts[self.rank], x)
        return torch.cat(self.parts, dim)


@MANY
def test_what_all_ranks_have_of_their_parts_is_everything(split: PromptSplit) -> None:
    size = 4
    num_tokens, laid = int(MIXED.counts.sum()), list[Tensor]()
    x, device = torch.randn(num_tokens, 2, 3), torch.device("cpu")
    opened = [open_part(Joined(rank, size, laid), split, MIXED, NUM_WHOLE, device) for rank in range(size)]
    parts = [one[0] for one in opened if one is not None]
    for part in parts:
        part.all_tokens(part.own(x))
    for part in parts:
        assert torch.equal(part.all_tokens(part.own(x)), x)


class Cache:
    """Pages of MIXED's slots, in any order, filled with random numbers."""

    def __init__(self, *widths: tuple[int, int]) -> None:
        """`widths`: heads and numbers of each tensor."""
        generator = torch.Generator().manual_seed(0)
        num_slots, num_pages = len(MIXED.slots), -(-int(MIXED.ends.max()) // PAGE)
        pages = np.random.default_rng(0).permutation(num_slots * num_pages) + 1
        self.tables = torch.from_numpy(pages.reshape(1, num_slots, num_pages)).int()
        locations = (len(pages) + 1) * PAGE
        self.tensors = [torch.randn(locations, *width, generator=generator) for width in widths]

    def plan(self, rows: AttentionRows, window: int) -> CpuAttentionPlan:
        return CpuAttentionPlan(rows, self.tables, PAGE, (window,), torch.float32)


def parts_of(split: PromptSplit) -> list[tuple[Tensor, AttentionRows]]:
    parts = divide(MIXED, NUM_WHOLE, 3, split)
    assert parts is not None
    return [(torch.from_numpy(part.tokens), part.rows) for part in parts]


@MANY
@pytest.mark.parametrize("window", [0, 9])
def test_attention_of_parts_is_that_of_the_whole(split: PromptSplit, window: int) -> None:
    cache, scores = Cache((2, 16), (2, 16)), Scores(0.25, window)
    q = torch.randn(int(MIXED.counts.sum()), 4, 16, generator=torch.Generator().manual_seed(1))
    whole = sdpa.attend(q, *cache.tensors, cache.plan(MIXED, window).gathered, scores)
    ops = CpuOps(torch.float32, None)
    for tokens, rows in parts_of(split):
        found = ops.attention(q[tokens], *cache.tensors, cache.plan(rows, window), scores)
        torch.testing.assert_close(found, whole[tokens], atol=2e-6, rtol=1e-5)


@MANY
def test_latent_attention_of_parts_is_that_of_the_whole(split: PromptSplit) -> None:
    cache, num_tokens = Cache((1, 16), (1, 4)), int(MIXED.counts.sum())
    generator = torch.Generator().manual_seed(1)
    q, q_rope = (torch.randn(num_tokens, 3, width, generator=generator) for width in (8, 4))
    up = Up(*(torch.randn(3, *shape, generator=generator) for shape in ((8, 16), (16, 8))))
    whole = attend_latents(q, q_rope, *cache.tensors, up, cache.plan(MIXED, 0).gathered, 0.2)
    for tokens, rows in parts_of(split):
        plan = cache.plan(rows, 0).gathered
        found = attend_latents(q[tokens], q_rope[tokens], *cache.tensors, up, plan, 0.2)
        torch.testing.assert_close(found, whole[tokens], atol=2e-5, rtol=1e-4)


@MANY
def test_sparse_attention_of_parts_is_that_of_the_whole(split: PromptSplit) -> None:
    cache, num_tokens = Cache((1, 16), (1, 4 + 8)), int(MIXED.counts.sum())
    generator = torch.Generator().manual_seed(1)
    q, q_rope, index = (torch.randn(num_tokens, 3, width, generator=generator) for width in (8, 4, 8))
    weights = torch.rand(num_tokens, 3, generator=generator)
    keys, values = (torch.randn(3, *shape, generator=generator) for shape in ((8, 16), (16, 8)))
    ops = CpuOps(torch.float32, None)
    sparse, caches = SparseLatents(ops, (keys, values), 4, 12, 0.2), tuple(cache.tensors)
    whole = sparse.attend(q, q_rope, index, weights, caches, cache.plan(MIXED, 0))
    for tokens, rows in parts_of(split):
        plan = cache.plan(rows, 0)
        found = sparse.attend(q[tokens], q_rope[tokens], index[tokens], weights[tokens], caches, plan)
        torch.testing.assert_close(found, whole[tokens], atol=2e-5, rtol=1e-4)


def test_the_cpu_leaves_strides_to_torch() -> None:
    assert FACTS.gathers_rows
    rows = parts_of("round-robin-split")[0][1]
    assert rows.strides is not None and rows.strides.max() == 3
    assert not Cache((1, 8)).plan(rows, 0).is_plain and Cache((1, 8)).plan(MIXED, 0).is_plain

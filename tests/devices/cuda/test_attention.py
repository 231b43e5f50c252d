"""Paged attention in Triton against the definition in float64: what the conformance suite does not ask of
every device."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.attention import AttentionLaunch, AttentionPlan, attention, plan_attention
from runtime.devices.cuda.attention_tiles import list_query_tiles, select_splits, select_tile
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.models.config.block import Alibi
from tests.devices.cuda.torch_device import DTYPES, GPU, TORCH_DEVICE, near

NOTHING = np.empty(0, np.int32)
Rows = list[tuple[int, int]]  # starts and counts


@dataclass
class Cache:
    """Keys and values of all rows, in scrambled pages; what no row has is NaN."""

    keys: Tensor
    values: Tensor
    table: Tensor
    known: list[tuple[Tensor, Tensor]]  # of each row, in order


def fill(
    rows: Rows,
    kv_heads: int,
    dims: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> Cache:
    """Random pages of sequences."""
    generator = torch.Generator().manual_seed(len(rows) + kv_heads)
    most = -(-max(start + count for start, count in rows) // page_size)
    table = torch.from_numpy(
        np.random.default_rng(0).permutation(most * len(rows)).reshape(len(rows), most) + 1
    ).int()
    caches = [
        torch.full(((table.numel() + 1) * page_size, kv_heads, dim), math.nan).to(kv_dtype) for dim in dims
    ]
    known = []
    for row, (start, count) in enumerate(rows):
        at = torch.arange(start + count)
        places = table[row].long()[at // page_size] * page_size + at % page_size
        pair = [
            torch.randn(start + count, kv_heads, dim, generator=generator).to(dtype).to(kv_dtype)
            for dim in dims
        ]
        for cache, x in zip(caches, pair, strict=True):
            cache.view(torch.uint8).view(len(cache), -1)[places] = x.view(torch.uint8).view(len(x), -1)
        known.append((pair[0].double(), pair[1].double()))
    return Cache(
        caches[0].to(TORCH_DEVICE), caches[1].to(TORCH_DEVICE), table.unsqueeze(0).to(TORCH_DEVICE), known
    )


def by_the_book(q: Tensor, k: Tensor, v: Tensor, start: int, scores: Scores) -> Tensor:
    """Float64: q [n, H, DK], k [L, K, DK], v [L, K, DV]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    found = torch.einsum("qhd,khd->hqk", q.double().cpu(), k) * scores.scale
    if scores.cap:
        found = scores.cap * (found / scores.cap).tanh()
    distance = (start + torch.arange(len(q))).unsqueeze(1) - torch.arange(len(k))
    if scores.slopes is not None:
        found = found - scores.slopes.double().cpu()[:, None, None] * distance
    is_hidden = (distance < 0) | (
        (distance >= scores.window) if scores.window else torch.zeros_like(distance, dtype=torch.bool)
    )
    found = found.masked_fill(is_hidden, -math.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.double().cpu()[:, None, None].expand(-1, len(q), 1)
        found = torch.cat((found, sinks), 2)
    weights = found.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)


def check(
    rows: Rows,
    num_decodes: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    dtype: torch.dtype,
    scores: Scores,
    kv_dtype: torch.dtype | None = None,
    gpu: Gpu = GPU,
) -> None:
    """Compares attention with the formula."""
    cache = fill(rows, heads[1], dims, page_size, dtype, kv_dtype or dtype)
    starts, counts = np.array(rows, np.int32).T
    plan = AttentionRows(num_decodes, np.arange(len(rows), dtype=np.int32), starts, counts)
    q = (
        torch.randn(int(counts.sum()), heads[0], dims[0], generator=torch.Generator().manual_seed(5))
        .to(dtype)
        .to(TORCH_DEVICE)
    )
    found = attention(q, cache.keys, cache.values, plan_attention(plan, cache.table, page_size), scores, gpu)
    parts = zip(q.split(counts.tolist()), cache.known, starts.tolist(), strict=True)
    expected = torch.cat([by_the_book(part, *pair, start, scores) for part, pair, start in parts])
    assert found.dtype == dtype
    near(found, expected, dtype)


MIXED: Rows = [(70, 1), (3, 1), (130, 1), (0, 9), (61, 40)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_head_sizes(dim: int, dtype: torch.dtype) -> None:
    check(MIXED, 3, (4, 2), (dim, dim), 16, dtype, Scores(dim**-0.5))


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("window", [0, 1, 50])
def test_page_sizes(page_size: int, window: int) -> None:
    check(MIXED, 3, (2, 1), (16, 16), page_size, DTYPES[-1], Scores(0.25, window))


@pytest.mark.parametrize("heads", [(3, 3), (7, 1), (12, 2), (40, 1), (48, 2)])
def test_groups(heads: tuple[int, int]) -> None:
    """Also those that are no power of two, and those that a tile cannot hold."""
    check([(33, 1), (0, 1), (5, 11)], 2, heads, (16, 32), 16, torch.float32, Scores(0.25))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_caches(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """The definition takes the narrow numbers as they are."""
    check(MIXED, 3, (4, 2), (32, 32), 16, dtype, Scores(0.1), kv_dtype)


@pytest.mark.parametrize("window", [0, 20])
def test_cap_and_sinks(window: int) -> None:
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0], device=TORCH_DEVICE)
    for cap, sink in ((3.0, None), (0.0, sinks), (3.0, sinks)):
        check(MIXED, 3, (4, 2), (16, 16), 16, torch.float32, Scores(0.25, window, cap, sink))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (40, 1)])
def test_biases_of_distance(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Also of long rows, whose keys are split, of heads that share keys, and behind a cap."""
    slopes = torch.tensor(Alibi().slopes(heads[0]), device=TORCH_DEVICE)
    check(MIXED, 3, heads, (16, 16), 16, dtype, Scores(0.25, slopes=slopes))
    check([(1500, 1), (0, 1), (90, 3)], 2, heads, (16, 16), 16, dtype, Scores(0.25, cap=3.0, slopes=slopes))


def test_splits_of_every_kind() -> None:
    """Long rows and short ones together, with sinks and windows: some parts are empty, some begin within a
    page."""
    rows = [(1500, 1), (0, 1), (90, 1)]
    sinks = torch.tensor([0.5, -1.0], device=TORCH_DEVICE)
    for window in (0, 700):
        check(rows, 3, (2, 1), (16, 16), 16, torch.float32, Scores(0.25, window, 0.0, sinks))
    check([(1500, 1), (0, 1), (1400, 3)], 2, (2, 1), (16, 16), 64, torch.float32, Scores(0.25))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_batch(data: st.DataObject) -> None:
    decodes = data.draw(st.lists(st.tuples(st.integers(0, 200), st.just(1)), max_size=3))
    extends = data.draw(st.lists(st.tuples(st.integers(0, 150), st.integers(1, 80)), max_size=2))
    rows = [*decodes, *extends] or [(0, 1)]
    group, kv_heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2))
    check(
        rows,
        len(decodes),
        (group * kv_heads, kv_heads),
        (16, 16),
        data.draw(st.sampled_from([1, 3, 16, 64, 128])),
        torch.float32,
        Scores(0.3, data.draw(st.sampled_from([0, 1, 17, 64, 100]))),
        gpu=data.draw(st.sampled_from([GPU, Gpu(2, 100 << 10)])),
    )


def test_rows_of_nothing_are_zeros() -> None:
    """Padding of a captured step: rows live on the device, whose lengths the host does not know."""
    cache = fill([(9, 1)], 1, (16, 16), 4, torch.float32, torch.float32)
    rows = torch.tensor([[0, 0, 0], [9, 0, 5], [1, 0, 0], [0, 1, 2]], dtype=torch.int32, device=TORCH_DEVICE)
    plan = AttentionPlan((AttentionLaunch(rows, 0, 3, 4096, None),), cache.table, 4)
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(5)).to(TORCH_DEVICE)
    found = attention(q, cache.keys, cache.values, plan, Scores(0.25), GPU)
    near(found[:1], by_the_book(q[:1], *cache.known[0], 9, Scores(0.25)), torch.float32)
    assert torch.equal(found[1:].cpu(), torch.zeros(2, 2, 16))


def test_tiles() -> None:
    tiles = list_query_tiles(np.array([[0, 100], [5, 3]], np.int32), 2)
    assert tiles.tolist() == [[1, 1, 0, 0, 0], [2, 0, 4, 2, 0]]


@pytest.mark.parametrize(
    ("programs", "longest", "splits"),
    [(8, 64, 1), (8, 2048, 8), (8, 1 << 20, 32), (512, 1 << 20, 1), (128, 4096, 2)],
)
def test_splits_fill_the_card(programs: int, longest: int, splits: int) -> None:
    gpu = Gpu(132, 233472)
    assert select_splits(programs, longest, select_tile(4, 128, 2, gpu), gpu) == splits

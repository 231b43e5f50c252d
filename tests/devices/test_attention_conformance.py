"""Every device's attention against naive formulas in fp64."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.models.config.block import Alibi
from tests.devices.conformance import ON_DEVICES, Bench, bench

__all__ = ["bench"]  # a fixture
pytestmark = ON_DEVICES


ROWS = {  # starts and counts; the first so many are decodes
    "one decode": (1, [(0, 1)]),
    "one long decode": (1, [(37, 1)]),
    "decodes of all lengths": (6, [(0, 1), (3, 1), (4, 1), (60, 1), (63, 1), (12, 1)]),
    "fresh extend": (0, [(0, 13)]),
    "extend after prefix": (0, [(21, 9)]),
    "extends of several tiles": (0, [(5, 300), (0, 200)]),
    "mixed": (3, [(9, 1), (50, 1), (1, 1), (0, 7), (33, 20), (8, 1)]),
}


SHAPES = {  # heads, key/value heads, page size, head size
    "cpu": [(4, 4, 4, 16), (6, 2, 16, 16), (4, 1, 1, 16)],
    "cuda": [(4, 4, 4, 16), (6, 2, 16, 16), (4, 1, 1, 16)],
    "interpreter": [(2, 2, 4, 16), (3, 1, 16, 16), (4, 1, 1, 16)],
    "npu": [(4, 4, 128, 16), (6, 2, 256, 128), (4, 1, 128, 128)],
}


@pytest.mark.sampled(30, by="device")
@pytest.mark.parametrize("window", [0, 1, 6, 130])
@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("shape", range(3))
def test_attention(bench: Bench, device: str, case: str, window: int, shape: int) -> None:
    """Pages in scrambled order; what no row may see is NaN, so that looking at it shows."""
    check_attention(bench, case, SHAPES[device][shape], Scores(SHAPES[device][shape][3] ** -0.5, window))


# torch computes caps for an NPU (tests/ascend/test_exact.py)
@pytest.mark.where(holds=lambda device, cap, **_: device != "npu" or not cap)
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("cap", "has_sinks"), [(2.0, False), (0.0, True), (2.0, True)])
def test_caps_and_sinks(bench: Bench, device: str, window: int, cap: float, has_sinks: bool) -> None:
    sinks = torch.linspace(-2, 2, SHAPES[device][1][0], device=bench.torch_device) if has_sinks else None
    check_attention(bench, "mixed", SHAPES[device][1], Scores(0.7, window, cap, sinks))


@pytest.mark.where(holds=lambda device, **_: device != "npu")
@pytest.mark.sampled(12, by="device")
@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("shape", range(3))
def test_biases_of_distance(bench: Bench, device: str, case: str, shape: int) -> None:
    sizes = SHAPES[device][shape]
    slopes = torch.tensor(Alibi(max_bias=4).slopes(sizes[0]), device=bench.torch_device)
    for cap in (0.0, 2.0):
        check_attention(bench, case, sizes, Scores(0.3, cap=cap, slopes=slopes))


# of rows of "mixed", queries that see each other both ways
SPANS: dict[str, dict[int, list[list[int]]]] = {
    "in some rows": {3: [[1, 5]], 4: [[0, 4], [9, 20]]},
    "in all rows that extend": {3: [[0, 7]], 4: [[2, 3], [5, 19]], 5: [[0, 1]]},
}


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("spans", SPANS)
def test_tokens_that_see_each_other(bench: Bench, device: str, spans: str, window: int) -> None:
    """Rows with tokens of images beside others."""
    shape = SHAPES[device][1]
    check_attention(bench, "mixed", shape, Scores(shape[3] ** -0.5, window), SPANS[spans])


# starts and counts, in blocks
BLOCKS = [(0, 1), (5, 1), (3, 2), (0, 9)]


@pytest.mark.where(holds=lambda device, **_: device != "npu")  # which refuses such models
@pytest.mark.parametrize("size", [1, 4, 24])
def test_blocks_whose_tokens_see_each_other(bench: Bench, device: str, size: int) -> None:
    """Rows of a diffusion model: a block behind others, two at once, and a prompt."""
    shape = SHAPES[device][1]
    rows = [(size * start, size * count) for start, count in BLOCKS]
    spans = {row: [[at, at + size] for at in range(0, count, size)] for row, (_, count) in enumerate(rows)}
    check_rows(bench, 0, rows, shape, Scores(shape[3] ** -0.5), spans, size)


def check_attention(
    bench: Bench,
    case: str,
    shape: tuple[int, int, int, int],
    scores: Scores,
    spans: dict[int, list[list[int]]] | None = None,
) -> None:
    check_rows(bench, *ROWS[case], shape, scores, spans)


def check_rows(
    bench: Bench,
    num_decodes: int,
    rows: list[tuple[int, int]],
    shape: tuple[int, int, int, int],
    scores: Scores,
    spans: dict[int, list[list[int]]] | None = None,
    block_size: int = 0,
) -> None:
    """Spans are those of blocks, where there are any."""
    heads, kv_heads, page_size, dim = shape
    num_pages = -(-1000 // page_size)
    order = np.random.default_rng(0).permutation(num_pages * len(rows)) + 1
    table = torch.from_numpy(order.reshape(len(rows), num_pages)).int().to(bench.torch_device)
    caches = [
        torch.full(
            ((len(order) + 1) * page_size, kv_heads, dim),
            math.nan,
            dtype=bench.dtype,
            device=bench.torch_device,
        )
        for _ in range(2)
    ]
    for cache in caches:
        cache[:page_size] = 0
    slots = np.random.default_rng(1).permutation(len(rows)).astype(np.int32)
    q = bench.randn(sum(count for _, count in rows), heads, dim)
    expected, at = [], 0
    for row, (slot, (start, count)) in enumerate(zip(slots, rows, strict=True)):
        k, v = bench.randn(start + count, kv_heads, dim), bench.randn(start + count, kv_heads, dim)
        positions = torch.arange(start + count)
        places = table[int(slot)].cpu().long()[positions // page_size] * page_size + positions % page_size
        caches[0][places], caches[1][places] = k, v
        own = (spans or {}).get(row, [])
        expected.append(naive_attention(q[at : at + count], k, v, start, scores, own))
        at += count
    starts, counts = np.array(rows, np.int32).T
    of_rows = {row: np.array(own, np.int64) for row, own in (spans or {}).items()}
    given = None if block_size else of_rows or None
    plan = AttentionRows(num_decodes, slots, starts, counts, spans=given, block_size=block_size)
    prepared = bench.ops.plan_attention(plan, table.unsqueeze(0), page_size, tuple({0, scores.window}))
    bench.near(bench.ops.attention(q, *caches, prepared, scores), torch.cat(expected))


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, start: int, scores: Scores, spans: Sequence[Sequence[int]] = ()
) -> Tensor:
    window = scores.window
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    found = torch.einsum("qhd,khd->hqk", q.double(), k) * scores.scale
    found = scores.cap * (found / scores.cap).tanh() if scores.cap else found
    distance = (start + torch.arange(len(q))).unsqueeze(1) - torch.arange(len(k))
    is_later = distance < 0
    for begin, end in spans:
        is_later[begin:end, : start + end] = False
    hidden = is_later | ((distance >= window) if window else torch.zeros_like(distance, dtype=torch.bool))
    if scores.slopes is not None:
        found = found - (scores.slopes.double()[:, None, None] * distance.to(q.device))
    found = found.masked_fill(hidden.to(q.device), -math.inf)
    if scores.sinks is not None:
        found = torch.cat((found, scores.sinks.double()[:, None, None].expand(-1, len(q), 1)), 2)
    return torch.einsum("hqk,khd->qhd", found.softmax(-1)[..., : len(k)], v)


LATENTS = {"npu": (4, 128)}  # heads and page size, where a device has limits


@pytest.mark.sampled(16, by="device")
@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize(
    ("rank", "nope_dim", "rope_dim", "value_dim"),
    [(16, 8, 4, 8), (8, 12, 4, 24), (64, 8, 8, 16), (64, 48, 16, 48)],
)
def test_latent_attention(
    bench: Bench, device: str, case: str, rank: int, nope_dim: int, rope_dim: int, value_dim: int
) -> None:
    """Latents that are always, sometimes and hardly ever worth expanding."""
    num_decodes, rows = ROWS[case]
    heads, page_size = LATENTS.get(device, (3, 8))
    num_pages = -(-1000 // page_size)
    order = np.random.default_rng(0).permutation(num_pages * len(rows)) + 1
    table = torch.from_numpy(order.reshape(len(rows), num_pages)).int().to(bench.torch_device)
    sizes = [((len(order) + 1) * page_size, 1, dim) for dim in (rank, rope_dim)]
    caches = [torch.full(size, math.nan, dtype=bench.dtype, device=bench.torch_device) for size in sizes]
    for cache in caches:
        cache[:page_size] = 0
    slots = np.random.default_rng(1).permutation(len(rows)).astype(np.int32)
    num_tokens, scale = sum(count for _, count in rows), 0.2
    q, q_rope = bench.randn(num_tokens, heads, nope_dim + rope_dim).split((nope_dim, rope_dim), dim=2)
    up = bench.randn(heads, nope_dim + value_dim, rank) / 4
    expected, at = [], 0
    for slot, (start, count) in zip(slots, rows, strict=True):
        latents, ropes = bench.randn(start + count, 1, rank), bench.randn(start + count, 1, rope_dim)
        positions = torch.arange(start + count)
        places = table[int(slot)].cpu().long()[positions // page_size] * page_size + positions % page_size
        caches[0][places], caches[1][places] = latents, ropes
        made = torch.einsum("tr,hdr->thd", latents.double().squeeze(1), up.double())
        keys = (
            torch.cat((made[..., :nope_dim], ropes.double().expand(-1, heads, -1)), 2)
            * scale
            * math.sqrt(nope_dim + rope_dim)
        )
        queries = torch.cat((q[at : at + count], q_rope[at : at + count]), 2)
        expected.append(
            naive_attention(queries, keys, made[..., nope_dim:], start, Scores(queries.shape[2] ** -0.5))
        )
        at += count
    starts, counts = np.array(rows, np.int32).T
    plan = AttentionRows(num_decodes, slots, starts, counts)
    packed = bench.ops.pack_latent(up, nope_dim)
    prepared = bench.ops.plan_attention(plan, table.unsqueeze(0), page_size, (0,))
    bench.near(bench.ops.latent_attention(q, q_rope, *caches, packed, prepared, scale), torch.cat(expected))

"""Every form of tile that attention can be given on Hopper, against the definition in float64."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda import attention_tiles
from runtime.devices.cuda.attention import launch_attention, plan_attention, split_counters
from runtime.devices.cuda.attention_tiles import DECODES, FEW_LATENTS, LATENTS, PROMPTS, Tile, select_tile
from runtime.devices.cuda.kernels.launch import Gpu
from tests.devices.cuda.test_attention import Rows, by_the_book, check, fill
from tests.devices.cuda.torch_device import GPU, HAS_GPU, TORCH_DEVICE, near

HOPPER = replace(GPU, is_hopper=True)
BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(HAS_GPU and not GPU.is_hopper, reason="for Hopper")


def choose(monkeypatch: pytest.MonkeyPatch, kind: str, tile: Tile) -> None:
    """Makes a tile the chosen one of its kind."""
    monkeypatch.setitem(attention_tiles.CHOSEN, kind, tile)
    sizes = {"prompt": (65, 128), "decode": (4, 128), "few latents": (16, 512), "latents": (64, 512)}
    assert select_tile(*sizes[kind], 2, HOPPER, is_plain=True) == tile
    assert select_tile(*sizes[kind], 2, HOPPER) != tile
    assert select_tile(*sizes[kind], 2, replace(HOPPER, is_hopper=False), is_plain=True) != tile


def is_run(tile: Tile) -> bool:
    """Whether a GPU is there, or the interpreter knows the language of the kernel."""
    return HAS_GPU or not tile.walk.groups


IN_INTERPRETER = [name for name, tile in PROMPTS.items() if is_run(tile)]
OTHERS = {
    "scaled in the exponent",
    "64 queries",
    "tma",
    "tma, 5 stages",
    "tma, 7 stages",
    "tma, 64 keys, 5 stages",
    "splits of 1 tile",
    "tma, splits of 2 tiles",
}


def names(forms: Iterable[str]) -> list[object]:
    """Forms; those whose tiles are as those of others but for their number are for --full."""
    return [pytest.param(one, marks=[pytest.mark.full] if one in OTHERS else []) for one in forms]


@pytest.mark.parametrize("name", names(IN_INTERPRETER))
def test_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that ends within a page, a prefix that does, and a row of one token."""
    choose(monkeypatch, "prompt", PROMPTS[name])
    check([(0, 70), (61, 40), (130, 1)], 0, (4, 2), (128, 128), 64, BF16, Scores(0.09), gpu=HOPPER)


@pytest.mark.parametrize("name", names(DECODES))
def test_decodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are split and rows that are not, also in pages of several tiles, and with sinks."""
    choose(monkeypatch, "decode", DECODES[name])
    rows: Rows = [(1100, 1), (3, 1), (191, 1), (64, 1)]
    check(rows, 4, (4, 2), (128, 128), 64, BF16, Scores(0.09), gpu=HOPPER)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0], device=TORCH_DEVICE)
    check(rows[1:], 3, (4, 2), (128, 128), 128, BF16, Scores(0.09, sinks=sinks), gpu=HOPPER)


@pytest.mark.parametrize("name", names(name for name in FEW_LATENTS if is_run(FEW_LATENTS[name])))
def test_few_latents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_latents("few latents", FEW_LATENTS[name], 16, monkeypatch)


@pytest.mark.parametrize("name", names(name for name in LATENTS if is_run(LATENTS[name])))
def test_latents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_latents("latents", LATENTS[name], 20, monkeypatch)


def check_latents(
    kind: str,
    tile: Tile,
    heads: int,
    monkeypatch: pytest.MonkeyPatch,
    rows: Rows | None = None,
    page_size: int = 64,
    gpu: Gpu = HOPPER,
) -> None:
    """Absorbed MLA: one key for all heads, whose rotary part is in a cache of its own."""
    choose(monkeypatch, kind, tile)
    rows = rows or [(700, 1), (3, 1), (100, 1)]
    latents = fill(rows, 1, (512, 64), page_size, BF16, BF16)
    starts, counts = np.array(rows, np.int32).T
    num_decodes = len(rows) if counts.max() == 1 else 0
    step = AttentionRows(num_decodes, np.arange(len(rows), dtype=np.int32), starts, counts)
    plan = plan_attention(step, latents.table, page_size)
    q, rope = (torch.randn(int(counts.sum()), heads, dim).to(BF16).to(TORCH_DEVICE) for dim in (512, 64))
    found, caches = torch.full_like(q, float("nan")), (latents.keys, latents.keys)
    counters = split_counters(gpu, TORCH_DEVICE)
    launch_attention(
        found, q, *caches, plan.launches[0], plan, Scores(0.05), gpu, rope, latents.values, counters
    )
    parts = (x.split(counts.tolist()) for x in (torch.cat((q, rope), 2), found))
    for row, (whole, part) in enumerate(zip(*parts, strict=True)):
        keys, ropes = latents.known[row]
        expected = by_the_book(whole, torch.cat((keys, ropes), 2), keys, rows[row][0], Scores(0.05))
        near(part, expected, BF16)

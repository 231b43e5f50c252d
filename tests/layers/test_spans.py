"""Attention of rows with spans, whose tokens see each other both ways, against a mask of the whole
sequence."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.layers.attention import sdpa

PAGE, LENGTH, HEADS, DIM = 4, 700, 2, 8
SPANS = [(3, 9), (9, 12), (40, 640)]  # the last one is of several tiles


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """[LENGTH, H, D] of a sequence that is computed at once."""
    places = torch.arange(LENGTH)
    is_seen = places <= places.unsqueeze(1)
    for first, end in SPANS:
        is_seen[first:end, first:end] = True
    if window:
        is_seen &= places > places.unsqueeze(1) - window
    parts = (x.transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(*parts, attn_mask=is_seen).transpose(0, 1)


@pytest.mark.parametrize("window", [0, 7, 300])
@pytest.mark.parametrize("start", [0, 5, 100])
def test_spans_see_their_ends(start: int, window: int) -> None:
    """`start`: what is before it was computed earlier, up to within a span."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(LENGTH, HEADS, DIM, generator=generator) for _ in range(3))
    pages = -(-LENGTH // PAGE)
    table = torch.randperm(pages, generator=generator).int() + 1
    locations = (table.repeat_interleave(PAGE) * PAGE + torch.arange(PAGE).repeat(pages))[:LENGTH]
    caches = [torch.zeros((pages + 1) * PAGE, HEADS, DIM) for _ in range(2)]
    for cache, rows in zip(caches, (k, v), strict=True):
        cache[locations] = rows
    left = np.array([(max(first, start), end) for first, end in SPANS if end > start]) - start
    plan = AttentionRows(
        0, np.array([0], np.int32), np.array([start]), np.array([LENGTH - start], np.int32), spans={0: left}
    )
    tables = table.view(1, 1, -1)
    prepared = sdpa.plan_attention(plan, tables, PAGE, (window,), torch.float32)
    found = sdpa.attend(q[start:], *caches, prepared, Scores(DIM**-0.5, window=window))
    assert torch.allclose(found, expected(q, k, v, window)[start:], atol=1e-5)

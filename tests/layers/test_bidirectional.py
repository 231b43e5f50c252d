"""Attention in both directions with a window, tile by tile, against one dense mask."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from runtime.layers.attention import bidirectional
from runtime.layers.attention.bidirectional import bidirectional_attention, plan_bidirectional


@pytest.mark.parametrize("window", [1, 3, 20, 39, 500])
def test_windows(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bidirectional, "MIN_TILE", 8)
    counts = np.array([40, 1, 33, 35, 5], np.int64)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(int(counts.sum()), 2, 16, generator=generator) for _ in range(3))
    found = bidirectional_attention(q, k, v, plan_bidirectional(counts, torch.device("cpu")), window)
    begin = 0
    for count in counts.tolist():
        row = slice(begin, begin + count)
        positions = torch.arange(count)
        seen = (positions[:, None] - positions).abs() <= window
        queries, keys, values = (x[row].transpose(0, 1) for x in (q, k, v))
        expected = scaled_dot_product_attention(queries, keys, values, attn_mask=seen).transpose(0, 1)
        torch.testing.assert_close(found[row], expected.flatten(1))
        begin += count

"""Weights on their way to the L2 cache during collectives: which, and how much of them."""

import pytest
import torch
import torch_npu
from torch import Tensor

pytestmark = pytest.mark.ascend


def test_the_weight_behind_the_latest_one_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.devices.ascend.prefetch import WeightPrefetch

    first, second, third = (
        torch.zeros(rows, 64, dtype=torch.bfloat16, device="npu") for rows in (16, 32, 48)
    )
    loaded: list[tuple[int, int]] = []

    def load(weight: Tensor, dependency: None, max_size: int) -> None:
        loaded.append((len(weight), max_size))

    monkeypatch.setattr(torch_npu, "npu_prefetch", load)
    prefetch = WeightPrefetch(3000)
    for _ in range(2):
        for weight in (first, second, third):
            prefetch.follow(weight)
            prefetch.begin()
    # nothing is known of the first step; the last weight of a step is followed by the first of the next
    assert loaded == [(32, 3000), (48, 3000), (16, 2048)]
    del second
    prefetch.follow(first)
    prefetch.begin()
    assert len(loaded) == 3, "a weight that is gone"

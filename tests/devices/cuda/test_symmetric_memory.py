"""Which sums go through memory that the GPUs share. What the operators do is a double's: it has the other
rank's numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.cuda import collectives
from runtime.devices.cuda.collectives import NcclCollectives
from runtime.devices.cuda.symmetric_memory import ONE_SHOT, SymmetricSums


class Ops:
    """Of a group of two, where the other has ones."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.calls: list[str] = []

    def one_shot_all_reduce(self, x: Tensor, kind: str, group: str) -> Tensor:
        assert (
            (kind, group) == ("sum", "all") and x.data_ptr() == self.buffer.data_ptr() and x.is_contiguous()
        )
        self.calls.append("one shot")
        return x + 1

    def two_shot_all_reduce_(self, x: Tensor, kind: str, group: str) -> Tensor:
        assert (
            (kind, group) == ("sum", "all") and x.data_ptr() == self.buffer.data_ptr() and x.is_contiguous()
        )
        self.calls.append("two shots")
        return x.add_(1)


def opened() -> tuple[SymmetricSums, Ops]:
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    ops = Ops(buffer)
    return SymmetricSums(buffer, "all", 2, ops), ops


SHAPES: list[tuple[tuple[int, ...], torch.dtype, str | None]] = [
    ((4, 8), torch.bfloat16, "one shot"),
    ((ONE_SHOT // 4,), torch.float32, "one shot"),
    ((ONE_SHOT // 4 + 8,), torch.float32, "two shots"),
    ((8, 64, 512), torch.bfloat16, "two shots"),
    ((1 << 18,), torch.float32, "two shots"),
    ((ONE_SHOT // 4 + 4,), torch.float32, None),
    ((1 << 20,), torch.bfloat16, None),
    ((3,), torch.float32, None),
    ((8,), torch.float16, None),
    ((0, 8), torch.float32, None),
]


@pytest.mark.parametrize(("shape", "dtype", "way"), SHAPES, ids=str)
def test_sums(shape: tuple[int, ...], dtype: torch.dtype, way: str | None) -> None:
    sums, ops = opened()
    x = torch.randn(shape).to(dtype)
    expected = x + 1
    found = sums.sum(x)
    assert ops.calls == ([way] if way else []) and (found is None) == (way is None)
    assert found is None or (torch.equal(found, expected) and found.data_ptr() != ops.buffer.data_ptr())


def test_what_is_nothing_for_it_goes_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda x, group, async_op: asked.append(x))
    ranks = NcclCollectives.__new__(NcclCollectives)
    ranks.group = ranks.meanwhile = None
    ranks.sums, ops = opened()
    small, odd = torch.zeros(8), torch.zeros(3)
    assert ranks.all_reduce(small).tolist() == [1.0] * 8 and asked == []
    assert ranks.all_reduce(odd) is odd and asked == [odd] and ops.calls == ["one shot"]
    ranks.sums = None
    assert ranks.all_reduce(small) is small and asked == [odd, small]

"""Which sums go through memory that the GPUs share. What the operators do is a double's: it has the other
rank's numbers."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.cuda import collectives, nccl_window
from runtime.devices.cuda.collectives import NcclCollectives
from runtime.devices.cuda.nccl_window import BUFFER, WindowSums
from runtime.devices.cuda.symmetric_memory import ONE_SHOT, SymmetricSums
from runtime.errors import StartError


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


class Right(Ops):
    """Operators of one rank of three: the other two bring what SymmetricSums.check has them bring."""

    error = 0

    def one_shot_all_reduce(self, x: Tensor, kind: str, group: str) -> Tensor:
        self.calls.append("one shot")
        return 3 * x + 3 + self.error

    def two_shot_all_reduce_(self, x: Tensor, kind: str, group: str) -> Tensor:
        self.calls.append("two shots")
        return x.mul_(3).add_(3 + self.error)


def checked(error: int = 0) -> SymmetricSums:
    buffer = torch.zeros(1 << 20, dtype=torch.uint8)
    ops = Right(buffer)
    ops.error = error
    return SymmetricSums(buffer, "all", 3, ops)


def test_sums_are_tried_at_start() -> None:
    """As rank 0: the others have the same numbers and 1 and 2 more."""
    sums: Any = checked()
    sums.check(0)
    assert set(sums.ops.calls) == {"one shot", "two shots"}
    with pytest.raises(RuntimeError, match="a sum of 48 bytes in torch.bfloat16 was wrong"):
        checked(1).check(0)


FAULT = "no access from GPU 0 to GPU 1"


@pytest.mark.parametrize(
    ("own", "others", "reason"),
    [
        (checked, [[], []], ""),
        (lambda: checked(1), [[], []], "a sum of 48 bytes in torch.bfloat16 was wrong"),
        (checked, [[FAULT]], FAULT),
        (checked, [[], ["a sum was wrong"]], "a sum was wrong"),
        (None, [[]], FAULT),
    ],
    ids=["all can", "its own sum is wrong", "another cannot", "another's sum is wrong", "it cannot"],
)
def test_memory_that_cannot_be_shared_is_left_out_by_all_ranks(
    own: Any, others: list[list[str]], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank reports equally often, and tries sums only where all have the memory."""

    def opened(*_: Any) -> SymmetricSums:
        if own is None:
            raise RuntimeError(FAULT + "\nand where in C++")
        return own()

    monkeypatch.setattr(SymmetricSums, "open", opened)
    for is_required in (False, True):
        ranks = NcclCollectives.__new__(NcclCollectives)
        ranks.rank, ranks.size, answers = 0, 3, iter(others)
        monkeypatch.setattr(ranks, "outcomes", lambda mine, answers=answers: [mine, *next(answers)])
        if reason and is_required:
            with pytest.raises(StartError, match=f"--enable-torch-symm-mem.*{reason}"):
                ranks._open_sums("all", torch.device("cpu"), is_required=True)
        else:
            found = ranks._open_sums("all", torch.device("cpu"), is_required=is_required)
            assert (found is None) is bool(reason)
        assert list(answers) == []


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


class Pool:
    """torch.cuda.MemPool."""

    def __init__(self, allocator: str) -> None:
        assert allocator == "nccl"


class Backend:
    """What torch 2.9 and later have of a process group of NCCL."""

    mem_allocator = "nccl"

    def __init__(self) -> None:
        self.registered: list[tuple[Any, bool]] = []

    def register_mem_pool(self, pool: Any, symm: bool) -> None:
        self.registered.append((pool, symm))


class Group:
    def __init__(self, backend: object) -> None:
        self.backend = backend

    def _get_backend(self, torch_device: torch.device) -> object:
        return self.backend


def test_sums_in_memory_that_nccl_has_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: nullcontext())
    group: Any = Group(backend := Backend())
    sums = WindowSums.open(group, torch.device("cpu"))
    ((pool, is_symmetric),) = backend.registered
    assert isinstance(pool, Pool) and is_symmetric and sums.buffer.nbytes == BUFFER

    def add_ones(x: Tensor, group: object) -> None:
        assert x.data_ptr() == sums.buffer.data_ptr() and group is sums.group
        x.add_(1)

    monkeypatch.setattr(nccl_window.dist, "all_reduce", add_ones)
    x = torch.randn(3, 5, dtype=torch.bfloat16)
    expected = x + 1
    assert sums.sum(x) is x and torch.equal(x, expected)
    assert (
        sums.sum(torch.empty(0, 4)) is None and sums.sum(torch.empty(BUFFER + 1, dtype=torch.uint8)) is None
    )


def test_a_torch_that_registers_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    group: Any = Group(object())
    with pytest.raises(StartError, match="--enable-symm-mem: this torch and its NCCL register no symmetric"):
        WindowSums.open(group, torch.device("cpu"))

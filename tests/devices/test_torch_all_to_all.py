"""What travels of tokens: one row of bytes, of numbers as they are, or as the experts round them."""

import pytest
import torch

from runtime.devices.cpu.moe import CpuExperts
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.single_rank import SingleRank
from runtime.devices.torch_all_to_all import open_all_to_all, pack, unpack

IDS = torch.tensor([[3, 0], [-1, -1], [7, 2]])
WEIGHTS = torch.rand(3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_as_they_went(dtype: torch.dtype) -> None:
    x = torch.randn(3, 6).to(dtype)
    rows = pack(x, IDS, WEIGHTS, is_rounded=False)
    assert rows.shape == (3, 6 * dtype.itemsize + 16)
    found = unpack(rows[[2, 0]], x, 2, is_rounded=False)
    for got, sent in zip(found, (x, IDS, WEIGHTS), strict=True):
        assert got.dtype == sent.dtype and torch.equal(got, sent[[2, 0]])


def test_quantizing_twice_is_quantizing_once() -> None:
    """Of float32; a token of nothing but zeros stays one."""
    x = torch.cat((torch.randn(64, 40) * torch.rand(64, 1).exp(), torch.zeros(1, 40)))
    ids, weights = torch.zeros(65, 1, dtype=torch.int64), torch.ones(65, 1)
    rows = pack(x, ids, weights, is_rounded=True)
    assert rows.shape == (65, 40 + 4 + 8)
    once, *_ = unpack(rows, x, 1, is_rounded=True)
    twice, *_ = unpack(pack(once, ids, weights, is_rounded=True), x, 1, is_rounded=True)
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)
    assert (once - x).abs().max() <= (x.abs().amax(1) / 254).max() * 1.001 and not once[-1].any()


def test_one_rank_has_no_other_rank_to_exchange_with() -> None:
    experts = CpuExperts(CpuOps(torch.float32))
    assert open_all_to_all("deepep", "auto", SingleRank(), experts) is None
    assert open_all_to_all("none", "auto", SingleRank(), experts) is None

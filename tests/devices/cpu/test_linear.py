"""Products of packed weights: oneDNN meets few numbers of rows, because it keeps kernels for each."""

import pytest
import torch
from torch.nn import functional as F

from runtime.devices.cpu.ops import CpuOps, padded_rows

packs = pytest.mark.skipif(
    not CpuOps(torch.bfloat16).packs, reason="this CPU computes bfloat16 without packed weights"
)


def test_padded_rows_are_few_and_waste_little() -> None:
    sizes = {padded_rows(num_rows) for num_rows in range(1, 577)}
    assert len(sizes) == 31
    for num_rows in range(1, 577):
        assert num_rows <= padded_rows(num_rows) < max(num_rows + 8, num_rows * 1.5)
        assert padded_rows(padded_rows(num_rows)) == padded_rows(num_rows)


@packs
@pytest.mark.parametrize("num_rows", [1, 8, 9, 63, 65, 100])
def test_rows_are_those_of_the_product(num_rows: int) -> None:
    ops, weight = CpuOps(torch.bfloat16), torch.randn(40, 64).bfloat16()
    x, bias = torch.randn(num_rows, 64).bfloat16(), torch.randn(40).bfloat16()
    product = ops.linear(x, ops.pack_linear(weight), bias)
    assert product.shape == (num_rows, 40)
    torch.testing.assert_close(product, F.linear(x, weight, bias), atol=0.1, rtol=0.02)

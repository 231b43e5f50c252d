"""Experts on an NPU: what the conformance suite (tests/devices) leaves open."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cpu.moe import CpuExperts
from runtime.devices.cpu.ops import CpuOps
from runtime.models.config.moe_config import Routing
from runtime.models.config.quantization_schemes import Int8
from tests.devices.conformance import Bench
from tests.devices.test_schemes import random_weight

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]

DEEPSEEK3 = Routing(
    top_k=8,
    score="sigmoid",
    num_groups=8,
    top_groups=4,
    group_score="two largest",
    normalizes=True,
    scale=2.5,
)


@pytest.fixture
def bench() -> Bench:
    return Bench("npu", torch.float32)


def on_cpu(weight: Quantized) -> Quantized:
    names = ("weight", "scale", "input_scale", "input_offset", "sums")
    return Quantized(
        weight.scheme,
        **{name: tensor.cpu() for name in names if (tensor := getattr(weight, name)) is not None},
    )


def answers(bench: Bench, stacks: tuple[Any, Any], ids: Tensor, experts: Any = None) -> tuple[Tensor, Tensor]:
    """Of the NPU, and of the cpu device."""
    x, shares = (
        bench.randn(len(ids), 64) / 4,
        torch.rand(ids.shape, generator=bench.generator).to(bench.torch_device),
    )
    cpu, npu = CpuExperts(CpuOps(torch.float32)), experts or bench.experts
    if isinstance(stacks[0], Quantized):
        mine, theirs = npu.pack_quantized(*stacks), cpu.pack_quantized(*map(on_cpu, stacks))
    else:
        mine, theirs = (
            npu.pack(*(stack.clone() for stack in stacks)),
            cpu.pack(*(stack.cpu() for stack in stacks)),
        )
    found, wanted = npu.apply(x, ids, shares, mine), cpu.apply(x.cpu(), ids.cpu(), shares.cpu(), theirs)
    return found.cpu(), wanted


@pytest.mark.parametrize("scheme", [Int8(), Int8("tensor")], ids=str)
@pytest.mark.parametrize("inner", [24, 32, 96])
def test_int8_with_and_without_the_fused_activation(bench: Bench, scheme: Int8, inner: int) -> None:
    """The fused one takes gates and inner parts that are multiples of 32 together."""
    stacks = random_weight(bench, scheme, 2 * inner, 64, (5,)), random_weight(bench, scheme, 64, inner, (5,))
    ids = torch.randint(-2, 7, (20, 3), generator=bench.generator).to(bench.torch_device)
    found, wanted = answers(bench, stacks, ids)
    assert (found - wanted).abs().mean() < 5e-3 * wanted.abs().mean()


@pytest.mark.parametrize(("count", "low", "high"), [(1, 0, 1), (1, -1, 2), (4, 4, 9), (4, -3, 0)])
def test_one_expert_and_none(bench: Bench, count: int, low: int, high: int) -> None:
    """A rank with a single expert; steps without an expert of this rank, where every row is
    undefined."""
    stacks = bench.randn(count, 64, 64) / 8, bench.randn(count, 64, 32) / 6
    found, wanted = answers(
        bench, stacks, torch.randint(low, high, (9, 2), generator=bench.generator).to(bench.torch_device)
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_all_experts_here(bench: Bench) -> None:
    from runtime.devices.ascend.moe import AscendExperts

    stacks = bench.randn(8, 64, 64) / 8, bench.randn(8, 64, 32) / 6
    ids = torch.randint(0, 8, (9, 2), generator=bench.generator).to(bench.torch_device)
    found, wanted = answers(bench, stacks, ids, AscendExperts(torch.float32, num_groups=1))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("num_experts", "routing", "is_taken"),
    [
        (256, DEEPSEEK3, True),
        (160, Routing(top_k=6, num_groups=8, top_groups=3, scale=16.0), True),
        (64, Routing(top_k=6), True),
        (128, Routing(top_k=8, normalizes=True), True),
        (8, Routing(top_k=2, num_groups=4, top_groups=2), False),
        (64, Routing(top_k=6, score="sigmoid"), False),
        (4096, Routing(top_k=6), False),
        (2, Routing(top_k=1), False),
    ],
)
def test_what_the_operator_chooses(bench: Bench, num_experts: int, routing: Routing, is_taken: bool) -> None:
    """The same as torch's operators choose."""
    from runtime.devices.ascend.moe import is_fused

    assert is_fused(num_experts, routing) == is_taken
    logits, bias = (
        torch.randn(*shape, generator=bench.generator) for shape in ((7, num_experts), (num_experts,))
    )
    with_bias = routing.score == "sigmoid"
    ids, weights = bench.experts.route(
        logits.to(bench.torch_device), bias.to(bench.torch_device) if with_bias else None, routing
    )
    wanted_ids, wanted = CpuExperts(CpuOps(torch.float32)).route(logits, bias if with_bias else None, routing)
    assert torch.equal(ids.cpu().sort().values, wanted_ids.sort().values)
    torch.testing.assert_close(weights.cpu().sort().values, wanted.sort().values)

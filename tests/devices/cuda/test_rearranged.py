"""Packed experts in another order, as devices have them: tensors keep their memory, matrices move."""

import pytest
import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cuda.moe import CudaExperts
from runtime.devices.experts import Experts
from runtime.devices.torch_rearranged import tensors_of
from runtime.layers.quantization.allocate import allocate_quantized
from runtime.layers.weight import replicated_shard
from runtime.models.config.quantization_schemes import Fp8
from tests.devices.cuda.torch_device import GPU, HAS_GPU, TORCH_DEVICE
from tests.devices.drive import start_rank

HIDDEN, INNER, OWN = 32, 32, 3


def cpu_experts() -> Experts:
    from runtime.devices.cpu.device import open_device

    return open_device(start_rank(""), 0, torch.float32).experts


def devices() -> list[tuple[str, Experts, torch.device]]:
    return [("cpu", cpu_experts(), torch.device("cpu")), ("cuda", CudaExperts(GPU), TORCH_DEVICE)]


def stacks(count: int, torch_device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(count)
    first, second = torch.randn(count, 2 * INNER, HIDDEN), torch.randn(count, HIDDEN, INNER)
    return (first / 8).to(torch_device), (second / 8).to(torch_device)


def applied(experts: Experts, packed: object, torch_device: torch.device) -> Tensor:
    """What the expert at each place makes of one and the same token. -> [OWN, HIDDEN]"""
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(5)).repeat(OWN, 1).to(torch_device)
    ids = torch.arange(OWN, device=torch_device).view(OWN, 1)
    return experts.apply(x, ids, torch.ones(OWN, 1, device=torch_device), packed)  # type: ignore[arg-type]


def memory(packed: object) -> list[int]:
    """Addresses of the tensors of packed experts."""
    return [t.data_ptr() for t in tensors_of(packed)]


@pytest.mark.parametrize("order", [[2, 0, 1], [0, 4, 2], [3, 3, 4]])
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_places(name: str, order: list[int]) -> None:
    experts, torch_device = next((one[1], one[2]) for one in devices() if one[0] == name)
    more = stacks(2, torch_device)
    whole = [torch.cat(pair) for pair in zip(stacks(OWN, torch_device), more, strict=True)]
    expected = applied(experts, experts.pack(*(part[order].contiguous() for part in whole)), torch_device)
    added = experts.pack(*more) if max(order) >= OWN else None
    packed = experts.pack(*stacks(OWN, torch_device))
    addresses = memory(packed)
    found = experts.rearranged(packed, added, order)
    assert torch.equal(applied(experts, found, torch_device), expected)
    if name == "cuda":
        assert memory(found) == addresses, "captured graphs go on"


@pytest.mark.skipif(HAS_GPU, reason="compares bytes on the cpu")
def test_quantized_places() -> None:
    """Weights of 8-bit floats, with scales."""
    experts, order = CudaExperts(GPU), [1, 2, 0]

    def quantized(rows: int, inputs: int) -> Quantized:
        scheme = Fp8()
        tensors = allocate_quantized(
            scheme, rows, replicated_shard(inputs), torch.float32, torch.device("cpu"), (OWN,)
        )
        tensors["weight"].view(torch.uint8).copy_(
            torch.arange(tensors["weight"].numel()).view(OWN, rows, inputs) % 100
        )
        tensors["scale"].copy_(torch.arange(1, tensors["scale"].numel() + 1).view(tensors["scale"].shape))
        return Quantized(scheme, **tensors)

    packed = experts.pack_quantized(quantized(2 * INNER, HIDDEN), quantized(HIDDEN, INNER))
    before = [(part.weight.clone(), part.scales.clone()) for part in packed if part.scales is not None]
    experts.rearranged(packed, None, order)
    for (weight, scales), part in zip(before, packed, strict=True):
        assert part.scales is not None and torch.equal(part.weight, weight[order])
        assert torch.equal(part.scales, scales[order])

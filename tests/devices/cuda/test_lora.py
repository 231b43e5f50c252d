"""The two launches of LoRA, and the plain form for captured steps, against the products of each LoRA slot."""

import numpy as np
import pytest
import torch

from runtime.devices.cuda import lora as adapters
from runtime.devices.cuda.kernels.launch import INTERPRETER, gpu_of
from runtime.devices.cuda.lora import CudaLoraOps
from runtime.devices.lora import LoraWeights
from runtime.layers.lora import TorchLoraOps
from tests.devices.cuda.torch_device import DTYPES, HAS_GPU, TORCH_DEVICE, near

LORA_SLOTS = {
    "one": [1],
    "no adapter": [-1, -1],
    "mixed": [2, -1, 0, 2, 2, -1, 0],
    "long": [0] * 37 + [-1] * 3 + [2] * 20,
}
# inputs, rank, parts
SHAPES = [(40, 4, ((0, 24),)), (100, 3, ((0, 70), (86, 16))), (1100, 24, ((8, 130), (138, 8), (150, 8)))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ins", "rank", "parts"), SHAPES)
def test_add(ins: int, rank: int, parts: tuple[tuple[int, int], ...], dtype: torch.dtype) -> None:
    """Columns that no part has, and rows without an adapter, stay to the bit."""
    generator = torch.Generator().manual_seed(ins)
    weights = LoraWeights(
        torch.randn(3, len(parts), rank, ins, generator=generator).div(ins**0.5).to(dtype),
        torch.randn(3, sum(size for _, size in parts), rank, generator=generator).to(dtype),
        parts,
    )
    plain, gpu = (
        TorchLoraOps(torch.device("cpu"), 3),
        CudaLoraOps(gpu_of(TORCH_DEVICE) if HAS_GPU else INTERPRETER, TORCH_DEVICE, 3),
    )
    there = LoraWeights(weights.a.to(TORCH_DEVICE), weights.b.to(TORCH_DEVICE), parts)
    for lora_slots in (np.array(case) for case in LORA_SLOTS.values()):
        x, before = (torch.randn(len(lora_slots), size, generator=generator).to(dtype) for size in (ins, 160))
        expected, found, masked = before.float().clone(), before.clone().to(TORCH_DEVICE), before.clone()
        plain.add(
            expected,
            x.float(),
            LoraWeights(weights.a.float(), weights.b.float(), parts),
            plain.plan(lora_slots),
        )
        gpu.add(found, x.to(TORCH_DEVICE), there, gpu.plan(lora_slots))
        plain.add(masked, x, weights, plain.plan_rows(torch.from_numpy(lora_slots)))
        near(found, expected, dtype, 2)
        near(masked, expected, dtype, 2)
        changes = torch.zeros(before.shape, dtype=torch.bool)
        for offset, size in parts:
            changes[lora_slots >= 0, offset : offset + size] = True
        assert torch.equal(found.cpu()[~changes], before[~changes]) and torch.equal(
            masked[~changes], before[~changes]
        )


def test_inputs_that_are_split_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, lora_slots = ((0, 16),), torch.tensor([1, 0, -1, 1], device=TORCH_DEVICE)
    weights = LoraWeights(
        torch.randn(2, 1, 8, 200, device=TORCH_DEVICE), torch.randn(2, 16, 8, device=TORCH_DEVICE), parts
    )
    x, found = torch.randn(4, 200, device=TORCH_DEVICE), []
    for least in (1000, 70):
        monkeypatch.setattr(adapters, "SPLIT_INPUTS", least)
        gpu = CudaLoraOps(INTERPRETER, TORCH_DEVICE, 2)
        found.append(torch.zeros(4, 16, device=TORCH_DEVICE))
        gpu.add(found[-1], x, weights, gpu.plan_rows(lora_slots))
    near(found[0] / 30, found[1] / 30, torch.float32)
    assert found[0][[0, 1, 3]].abs().min() > 0

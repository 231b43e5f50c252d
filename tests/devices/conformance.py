"""Devices that conformance tests compare, and tensors on them. A new device joins by a row in DEVICES."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.base import Ops
from runtime.devices.cpu.moe import CpuExperts
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.experts import Experts
from runtime.devices.operands import FusedOps
from runtime.layers.fused_ops import UnfusedOps


def interpreted_ops(dtype: torch.dtype) -> Ops:
    """Triton's kernels on tensors of the cpu."""
    from runtime.devices.cuda.kernels.launch import INTERPRETER
    from runtime.devices.cuda.ops import CudaOps

    return CudaOps(dtype, INTERPRETER)


def cuda_ops(dtype: torch.dtype) -> Ops:
    from runtime.devices.cuda.kernels.launch import gpu_of
    from runtime.devices.cuda.ops import CudaOps

    return CudaOps(dtype, gpu_of(torch.device("cuda")))


def cuda_experts(ops: Any) -> Experts:
    from runtime.devices.cuda.moe import CudaExperts

    return CudaExperts(ops.gpu)


def ascend_ops(dtype: torch.dtype) -> Ops:
    from runtime.devices.ascend.device import import_npu, set_device
    from runtime.devices.ascend.options import AscendOptions

    import_npu()
    torch_device = set_device(AscendOptions(), 0)
    from runtime.devices.ascend.ops import AscendOps

    return AscendOps(dtype, 128, torch_device)


def ascend_experts(ops: Any) -> Experts:
    from runtime.devices.ascend.moe import AscendExperts

    return AscendExperts(ops.dtype, num_groups=2)


DEVICES: dict[str, tuple[str, Callable[[torch.dtype], Ops], Callable[[Any], Experts]]] = {
    "cpu": ("cpu", CpuOps, CpuExperts),
    "npu": ("npu", ascend_ops, ascend_experts),
    "cuda": ("cuda", cuda_ops, cuda_experts),
    "interpreter": ("cpu", interpreted_ops, cuda_experts),
}
MARKS = {
    "npu": [pytest.mark.ascend, pytest.mark.lenient],
    "cuda": [pytest.mark.cuda],
    # Triton compiles its kernels where there is a GPU, and interprets them elsewhere
    "interpreter": [pytest.mark.where(holds=lambda **_: not torch.cuda.is_available())],
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}

ON_DEVICES = [  # marks of a module whose tests compare every device
    pytest.mark.parametrize("device", [pytest.param(name, marks=MARKS.get(name, [])) for name in DEVICES]),
    pytest.mark.parametrize("dtype", TOLERANCE, ids=str),
    # the interpreter is slow, and float16 takes the same ways as bfloat16
    pytest.mark.where(holds=lambda device, dtype, **_: device != "interpreter" or dtype != torch.float16),
]


def fused(ops: Any) -> FusedOps:
    if type(ops).__name__ == "AscendOps":
        from runtime.devices.ascend.fused import AscendFusedOps

        return AscendFusedOps(ops)
    if type(ops).__name__ != "CudaOps":
        return UnfusedOps(ops)
    from runtime.devices.cuda.fused import CudaFusedOps

    return CudaFusedOps(ops)


class Bench:
    """A device's ops, and tensors on it from fixed seeds."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.ops = DEVICES[device][1](dtype)
        self.torch_device = torch.device(DEVICES[device][0])
        self.experts = DEVICES[device][2](self.ops)
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(1)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(self.torch_device)

    def near(self, found: Tensor, expected: Tensor) -> None:
        assert found.dtype == self.dtype and found.shape == expected.shape
        torch.testing.assert_close(
            found.double().cpu(), expected.cpu(), atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype]
        )


@pytest.fixture
def bench(device: str, dtype: torch.dtype) -> Bench:
    return Bench(device, dtype)

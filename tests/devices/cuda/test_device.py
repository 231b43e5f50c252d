"""How a GPU is opened, on a machine that has none."""

import pytest
import torch

from runtime.devices.cuda import device as cuda_device
from runtime.devices.cuda.fused import CudaFusedOps
from runtime.devices.cuda.lora import CudaLoraOps
from runtime.devices.cuda.moe import CudaExperts
from runtime.devices.cuda.ops import CudaOps
from tests.devices.cuda.torch_device import HAS_GPU
from tests.devices.drive import start_rank


@pytest.mark.skipif(HAS_GPU, reason="other tests open the GPU")
def test_each_part_is_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are torch's, and what has no kernel of its own is computed by Ops."""
    monkeypatch.setattr(cuda_device, "set_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    device = cuda_device.open_device(start_rank("", device="cuda"), 0, torch.bfloat16)
    assert isinstance(device.ops, CudaOps) and isinstance(device.experts, CudaExperts)
    assert isinstance(device.fused, CudaFusedOps) and not isinstance(device.lora_ops, CudaLoraOps)
    assert device.streams is torch.cuda and device.logits_ops is None and device.ep_size == 1

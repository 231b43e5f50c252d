"""How a GPU is opened, on a machine that has none."""

import pytest
import torch

from runtime.devices.cuda import device as cuda_device
from runtime.devices.cuda.fused import CudaFusedOps
from runtime.devices.cuda.lora import CudaLoraOps
from runtime.devices.cuda.moe import CudaExperts
from runtime.devices.cuda.ops import CudaOps
from runtime.devices.cuda.options import CudaOptions
from runtime.errors import StartError
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
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


def test_gpus_without_access_to_each_other_are_refused_where_that_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPU 4 of a replica on GPUs 2, 4, 6 and 8 asks for access to the other three."""
    asked: list[int] = []

    def can_access(own: int, other: int) -> bool:
        asked.append(other)
        return own == 4 and other != 8

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    options = CudaOptions(base_gpu_id=2, gpu_id_step=2)
    cuda_device.check_peers(options, 4, 2, 3)
    assert asked == [2, 6]
    with pytest.raises(StartError, match="GPU 4 has no access to the memory of GPU 8"):
        cuda_device.check_peers(options, 4, 2, 4)


def test_options_of_several_gpus_reach_their_ranks() -> None:
    flags = ("enable_nccl_nvls", "enable_p2p_check", "enable_symm_mem")
    plan = plan_for(from_values({"device": "cuda", "tensor_parallel_size": 2, **dict.fromkeys(flags, True)}))
    assert plan.rank_environment == {"NCCL_NVLS_ENABLE": "1"}
    assert plan.device_options["checks_peers"] and plan.device_options["nccl_window"]
    assert plan.device_options["symm_mem"] == "off"

"""Encoders of images and sounds on an NPU: rows equal the cpu's, and attention is the fused operator."""

import numpy as np
import pytest
import torch
import torch_npu

from runtime.devices.ascend.device import open_device as open_npu
from runtime.devices.cpu.device import open_device as open_cpu
from runtime.models.vision.open_encoder import open_encoder
from runtime.models.vision.slices import finish
from tests.devices.drive import start_rank
from tests.devices.towers import give_weights, media_of
from tests.models.towers import TOWERS

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]


@pytest.mark.parametrize("name", TOWERS)
def test_rows_are_those_of_the_cpu(name: str) -> None:
    assert torch_npu  # the simulation comes with it
    from tests.ascend.recorder import recorded

    config = TOWERS[name][0]
    cpu = open_encoder(open_cpu(start_rank(""), 0, torch.float32), torch.float32, config)
    npu = open_encoder(
        open_npu(start_rank("", device="npu", page_size=128), 0, torch.float32), torch.float32, config
    )
    give_weights([cpu, npu])
    media = media_of(name)
    with torch.inference_mode():
        expected = finish(cpu.slices(media))[0]
        with recorded() as trace:
            found = finish(npu.slices(media))[0].cpu()
    assert "npu_fusion_attention" in trace.text()
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=2e-5, rtol=2e-5)

"""Encoders of images and sounds on an NPU: rows equal the cpu's, and attention is the fused operator."""

import numpy as np
import pytest
import torch
import torch_npu

from runtime.devices.ascend.device import open_device as open_npu
from runtime.devices.cpu.device import open_device as open_cpu
from runtime.layers.weight import named_weights
from runtime.messages.media import MediaValues
from runtime.models.vision.open_encoder import open_encoder
from runtime.models.vision.slices import finish
from tests.devices.drive import start_rank
from tests.models.towers import TOWERS

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]


@pytest.mark.parametrize("name", TOWERS)
def test_rows_are_those_of_the_cpu(name: str) -> None:
    assert torch_npu  # the simulation comes with it
    from tests.ascend.recorder import recorded

    config, shape, grid = TOWERS[name]
    cpu = open_encoder(open_cpu(start_rank(""), 0, torch.float32), torch.float32, config)
    npu = open_encoder(
        open_npu(start_rank("", device="npu", page_size=128), 0, torch.float32), torch.float32, config
    )
    torch.manual_seed(0)
    weights = [list(named_weights(one)) for one in (cpu, npu)]  # type: ignore[arg-type]
    for (_, one), (_, other) in zip(*weights, strict=True):
        one.tensor.normal_(0, 0.2)
        other.tensor.copy_(one.tensor)
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32).ravel()
    media = [MediaValues(id=0, values=values, shape=shape, grid=grid, num_rows=0)]
    with torch.inference_mode():
        expected = finish(cpu.slices(media))[0]
        with recorded() as trace:
            found = finish(npu.slices(media))[0].cpu()
    assert "npu_fusion_attention" in trace.text()
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=2e-5, rtol=2e-5)

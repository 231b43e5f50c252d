"""The generation that was planned for is that of the NPU."""

from pathlib import Path

import pytest

from runtime.errors import StartError
from tests.devices.drive import start
from tests.models.make import make_checkpoint

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]


def test_a_plan_for_another_generation_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path, num_hidden_layers=1)
    options = {"device": "npu", "page_size": 128, "dtype": "float32", "max_len": 512}
    with pytest.raises(StartError, match="--npu-soc a3, and this NPU is Ascend910B3, of Atlas A2"):
        start(folder, **options, device_options={"soc": "a3"})
    start(folder, **options, device_options={"soc": "a2"}, max_total_tokens=1024)

"""Checkpoints in W8A8 on an NPU against the cpu device, which is exact; and what a device without a scheme says."""

from pathlib import Path

import pytest
import torch

from runtime.errors import ModelError
from tests.models.make import make_checkpoint
from tests.models.quantise import quantise
from tests.models.test_quantised import log_probabilities

pytestmark = pytest.mark.ascend


@pytest.mark.parametrize("name", ["ct int8", "ct int8 static", "modelslim W8A8", "modelslim W8A8_DYNAMIC"])
def test_tokens_are_as_likely_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    """An input on the edge of two codes may be rounded either way."""
    quantise(make_checkpoint("qwen2", tmp_path / "plain"), tmp_path, name)
    (cpu, tokens), (npu, others) = (log_probabilities(tmp_path / "quantised", device=device, page_size=128, dtype="float32")
                                    for device in ("cpu", "npu"))
    torch.testing.assert_close(npu, cpu, atol=5e-2, rtol=0)
    assert (npu - cpu).abs().mean() < 5e-3 and tokens == others


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    quantise(make_checkpoint("qwen2", tmp_path / "plain"), tmp_path, "fp8")
    with pytest.raises(ModelError, match="--device npu does not compute; it computes int8, int8_static"):
        log_probabilities(tmp_path / "quantised", device="npu", page_size=128)

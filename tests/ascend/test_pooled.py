"""Vectors of encoders and of decoders on an NPU equal the cpu's."""

from pathlib import Path

import numpy as np
import pytest

from tests.models.make_pooled import make_pooled, write_modules
from tests.models.test_pooled import vectors

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]


@pytest.mark.parametrize(
    ("family", "top", "mode"),
    [("bert", "embed", "mean"), ("qwen3", "embed", "last"), ("bert", "classify", "")],
)
def test_vectors(family: str, top: str, mode: str, tmp_path: Path) -> None:
    folder = make_pooled(family, top, tmp_path)
    if mode:
        write_modules(folder, mode)
    prompts = [[5, 9, 7], [8] * 20, [3, 1]]
    cpu, npu = (
        vectors(folder, prompts, device=device, page_size=128, dtype="float32") for device in ("cpu", "npu")
    )
    np.testing.assert_allclose(np.asarray(npu), np.asarray(cpu), atol=1e-5)

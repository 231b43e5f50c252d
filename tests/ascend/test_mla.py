"""Latent attention of full size on an NPU, at the limits that CANN documents; and what a start says of other
sizes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.errors import ModelError, StartError
from tests.ascend.emulate.table import Limits
from tests.devices import test_attention_conformance as conformance
from tests.devices.conformance import Bench
from tests.devices.drive import start
from tests.models.make import make_checkpoint

pytestmark = pytest.mark.ascend


def smaller(randn: Callable[..., Tensor], *shape: int) -> Tensor:
    """Scores of sums over 512 numbers, and what is made of latents, as models have them."""
    return randn(*shape) / (8 if len(shape) == 3 and shape[2] == 512 and shape[1] > 1 else 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("case", ["decodes of all lengths", "mixed", "a long chunk"])
def test_sizes_of_deepseek(
    case: str, heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few queries of a row are absorbed, more than 170 are expanded."""
    monkeypatch.setattr(Limits, "strict", True)
    monkeypatch.setitem(conformance.LATENTS, "npu", (heads, 128))
    monkeypatch.setitem(conformance.ROWS, "a long chunk", (1, [(40, 1), (100, 180), (3, 40)]))
    bench = Bench("npu", dtype)
    monkeypatch.setattr(bench, "randn", partial(smaller, bench.randn))
    conformance.test_latent_attention(bench, "npu", case, 512, 128, 64, 128)


@pytest.mark.parametrize(
    ("overrides", "kind", "words"),
    [
        (
            {},
            StartError,
            "latent attention of this NPU does not work in bfloat16 with 4 heads of 16 and 16, latents of 32",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6},
            ModelError,
            "6 heads are no power of two up to 128",
        ),
    ],
)
def test_other_sizes_are_reported_at_start(
    overrides: dict[str, Any],
    kind: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Limits, "strict", True)
    folder = make_checkpoint("deepseek_v3", tmp_path, qk_rope_head_dim=16, qk_nope_head_dim=16, **overrides)
    with pytest.raises(kind, match=words):
        start(folder, device="npu", page_size=128, dtype="bfloat16")

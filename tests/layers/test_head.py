"""The head in float32 behind layers in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices.drive import start
from tests.models.make import make_checkpoint


@pytest.mark.parametrize("is_tied", [False, True], ids=["own", "tied"])
def test_a_wide_head_computes_in_float32(is_tied: bool, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path, num_hidden_layers=1, tie_word_embeddings=is_tied)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for is_wide in (False, True):
        executor: Any
        executor, ready = start(folder, dtype="bfloat16", has_wide_head=is_wide)
        model = executor.runner.model
        with torch.inference_mode():
            found.append(
                (
                    model.logits(hidden.clone()),
                    model.norm.forward(hidden.clone()),
                    model.embed_tokens.forward(torch.arange(model.lm_head.vocab_size)),
                    ready,
                )
            )
    (narrow, _, _, before), (wide, normed, embedded, after) = found
    assert wide.dtype == narrow.dtype == torch.float32 and normed.dtype == embedded.dtype == torch.bfloat16
    assert not torch.equal(wide, wide.bfloat16().float())
    assert torch.allclose(wide, narrow, atol=0.05)
    if is_tied:
        torch.testing.assert_close(wide, normed.float() @ embedded.float().T, atol=1e-5, rtol=1e-5)
    else:
        assert after.weights_bytes - before.weights_bytes == 2 * wide.shape[1] * 64

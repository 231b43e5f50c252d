"""Steps that verify drafts as graphs of an NPU: tokens are those of decoding one by one, and no step is
launched operator by operator."""

from pathlib import Path
from typing import Any

import pytest

from runtime.messages.speculation import Speculation
from tests.ascend.test_exact import LATENT
from tests.devices.drive import Planner, start
from tests.models.make import make_checkpoint
from tests.ranks.test_own_drafts import decoded
from tests.ranks.test_verify import Guesses, finish, prefilled

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]

NGRAM = Speculation(algorithm="NGRAM", num_steps=0, topk=1, num_draft_tokens=6)
SIZES = [2, 4]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 128}),
    "deepseek 3": ("deepseek_v3", LATENT),
    "deepseek 3.2": ("deepseek_v32", LATENT | {"index_head_dim": 32}),
}


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_without_drafts(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with drafts and without, right and wrong ones, of one to three sequences."""
    family, overrides = MODELS[model]
    folder = make_checkpoint(family, tmp_path, **overrides)
    expected = [truth[:24] for truth in decoded(folder, {})]
    executor, ready = start(
        folder,
        device="npu",
        page_size=128,
        dtype="float32",
        max_len=512,
        max_total_tokens=2048,
        speculation=NGRAM,
        graph_sizes=SIZES,
    )
    for size in SIZES:
        assert [executor.capture(size, unit).error for unit in ("sequences", "verifies")] == ["", ""]
    planner = Planner(executor, ready, 128)
    rows = prefilled(planner, {})
    monkeypatch.setattr(executor.runner.forward, "compute", None)  # type: ignore[attr-defined]
    finish(planner, rows, expected, Guesses(1, 0.7, has_trees=False))

"""The memory plan of draft models against what a rank takes."""

from pathlib import Path
from typing import Any

import pytest

from runtime.devices.progress import without_progress
from runtime.models.config.model_config import read_config
from runtime.options.draft_sizes import draft_sizes
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from runtime.ranks.open_executor import open_executor
from runtime.settings import start_rank
from tests.models.make import make_checkpoint
from tests.models.make_heads import make_eagle, make_eagle3
from tests.models.make_next_token import add_next_token_layers
from tests.options.test_footprint import MACHINE, planned


def draft_of(algorithm: str, folder: Path) -> dict[str, Any]:
    match algorithm:
        case "EAGLE":
            path = make_eagle(folder)
        case "EAGLE3":
            path = make_eagle3(folder)
        case "STANDALONE":
            path = make_checkpoint("qwen3", folder, num_hidden_layers=1)
        case _:
            return {}
    return {"speculative_draft_model_path": str(path)}


@pytest.mark.parametrize(
    ("algorithm", "family", "num_layers"),
    [
        ("STANDALONE", "llama", 0),
        ("EAGLE", "llama", 0),
        ("EAGLE3", "llama", 0),
        ("NEXTN", "deepseek_v3", 1),
        ("NEXTN", "deepseek_v3", 3),
        ("NEXTN", "ernie4_5_moe", 1),
        ("NEXTN", "nemotron_h", 1),
        ("NEXTN", "qwen3_next", 1),
    ],
)
def test_weights_and_pages_are_those_that_a_rank_takes(
    algorithm: str, family: str, num_layers: int, tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 4} if family in ("llama", "deepseek_v3") else {}
    folder = make_checkpoint(family, tmp_path / "model", **sizes)
    if num_layers:
        add_next_token_layers(folder, num_layers)
    options: dict[str, Any] = {"max_total_tokens": 512, "device": "cpu", "num_threads": 1}
    options |= {"enable_multi_layer_eagle": num_layers > 1}
    options |= {"speculative_algorithm": algorithm} | draft_of(algorithm, tmp_path / "draft")
    plan, found = planned(folder, **options)
    ready = open_executor(0, start_rank(plan, read_config(folder)), without_progress).ready
    assert (found.weights_bytes, found.pages_bytes + found.states_bytes) == (
        ready.weights_bytes,
        ready.pages_bytes,
    )
    without = plan_for(from_values({"model_path": str(folder), "max_total_tokens": 512}), MACHINE)
    alone = open_executor(0, start_rank(without, read_config(folder)), without_progress).ready
    assert ready.weights_bytes > alone.weights_bytes and ready.pages_bytes > alone.pages_bytes


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_a_draft_model_with_recurrent_layers(family: str, tmp_path: Path) -> None:
    """Its weights and pages, and two states for each slot."""
    folder = make_checkpoint("llama", tmp_path / "model")
    options: dict[str, Any] = {"max_total_tokens": 512, "device": "cpu", "num_threads": 1}
    draft = make_checkpoint(family, tmp_path / "draft")
    options |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
    plan, found = planned(folder, **options)
    config = read_config(folder)
    executor = open_executor(0, start_rank(plan, config), without_progress)
    ready = executor.ready
    assert (found.weights_bytes, found.pages_bytes) == (ready.weights_bytes, ready.pages_bytes)
    drafts = executor.runner.drafts  # type: ignore[attr-defined]
    item = drafts.recurrent.memory.dtypes[0].itemsize
    expected = drafts.recurrent.memory.num_bytes + drafts.pending.tokens.nbytes
    assert draft_sizes(plan, config, item).slots_bytes == expected

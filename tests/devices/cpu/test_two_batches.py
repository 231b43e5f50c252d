"""Steps that ranks compute as two micro-batches in turns, over gloo: tokens are those of transformers, and
exactly those of steps that are not cut."""

from pathlib import Path
from typing import Any

import pytest

from tests.devices.cpu.ranks import RunRanks
from tests.devices.cpu.tp_rank import PROMPTS
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

DENSE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_attention_heads": 5, "hidden_size": 80, "num_key_value_heads": 1}),
    ("gemma2", {}),  # windows
    ("olmo2", {"num_hidden_layers": 1}),  # a sum over ranks before keys are stored
    ("gemma3n", {}),  # layers that read keys of earlier ones
]
RECURRENT: list[tuple[str, dict[str, Any]]] = [
    ("jamba", {}),  # the scan of Mamba 1, which sums over ranks between convolution and scan
    ("qwen3_next", {}),  # the gated delta rule
    ("falcon_h1", {}),  # the scan of Mamba 2, beside attention
]
EXPERTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("deepseek_v2", {"num_hidden_layers": 2}),
    ("qwen2_moe", {"num_hidden_layers": 1}),
]


def check(
    models: list[tuple[str, dict[str, Any]]], folder: Path, run: RunRanks, threshold: float, **options: Any
) -> None:
    """Two ranks, with and without cuts, against transformers."""
    folders = [make_checkpoint(family, folder / str(i), **more) for i, (family, more) in enumerate(models)]
    plain = run(2, folders, folder, **options)
    cut = run(2, folders, folder, **options, threshold=threshold)
    for one, alone, first, second in zip(folders, plain[0], *cut, strict=True):
        assert alone["overlaps"] == 0 and first["overlaps"] == second["overlaps"] > 50
        assert first["tokens"] == alone["tokens"] and first["counts"] == alone["counts"]
        assert first["logprobs"] == pytest.approx(alone["logprobs"], abs=2e-3)
        assert second["last"] == first["last"]
        reference = Reference(one)
        for prompt, tokens in zip(PROMPTS[:2], first["tokens"], strict=False):
            found = tokens[len(prompt) :]
            assert found == reference.greedy(prompt, len(found))


@pytest.mark.parametrize("threshold", [0.48, 0.0])
def test_sums_over_ranks(threshold: float, tmp_path: Path, run_ranks: RunRanks) -> None:
    check(DENSE, tmp_path, run_ranks, threshold)


@pytest.mark.parametrize("threshold", [0.48, 0.0])
def test_recurrent_states(threshold: float, tmp_path: Path, run_ranks: RunRanks) -> None:
    """The second half of a prompt goes on from the states that the first half leaves, layer by layer."""
    check(RECURRENT, tmp_path, run_ranks, threshold)


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_tokens_travel_to_experts(mode: str, tmp_path: Path, run_ranks: RunRanks) -> None:
    """Shared experts are computed meanwhile."""
    check(EXPERTS, tmp_path, run_ranks, 0.48, ep_size=2, mode=mode)

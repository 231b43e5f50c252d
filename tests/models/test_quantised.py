"""Quantised checkpoints of every format against transformers with the weights that they stand for, and inputs rounded as they ask."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.devices.drive import Planner, sampling, start
from tests.models.make import VOCAB_SIZE, make_checkpoint
from tests.models.quantise import FORMATS, Round, quantise
from tests.models.reference import Reference

PROMPT = np.random.default_rng(3).integers(0, VOCAB_SIZE, 30).tolist()
WEIGHT_ONLY = [name for name in FORMATS if name.startswith(("awq", "gptq", "ct int4", "ct int8 order", "ct fp8 w"))]


def reference(folder: Path, rounds: dict[str, Round]) -> Reference:
    """transformers, with inputs of quantised modules rounded."""
    found = Reference(folder)
    for name, module in found.model.named_modules():
        if name in rounds:
            module.register_forward_pre_hook(lambda _, given, of=rounds[name]: (of(given[0]),))
    return found


def log_probabilities(folder: Path, num_tokens: int = 6, **wishes: Any) -> tuple[Tensor, list[int]]:
    """Of the prompt's tokens, and a greedy continuation."""
    executor, ready = start(folder, **wishes)
    planner = Planner(executor, ready, 4)
    row = planner.row(0, PROMPT, sampling(prompt_logprobs=0))
    planner.prefill(row, chunk=17)
    while len(row.tokens) < len(PROMPT) + num_tokens:
        planner.run([row], [])
    return torch.from_numpy(np.concatenate([part.logprobs for part in row.prompt])[:-1]), row.tokens


def wanted(found: Reference, tokens: list[int]) -> Tensor:
    lines = found.logprobs(tokens)
    return lines[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_means_what_its_tool_wrote(name: str, tmp_path: Path) -> None:
    """An input on the edge of two codes may be rounded either way, so with rounded inputs single tokens differ a little more."""
    plain = make_checkpoint("qwen2", tmp_path / "plain")
    rounds = quantise(plain, tmp_path, name)
    assert len(rounds) == 14
    found, tokens = log_probabilities(tmp_path / "quantised")
    expected = wanted(reference(tmp_path / "meant", rounds), tokens)[: len(found)]
    is_rounded = name not in WEIGHT_ONLY
    torch.testing.assert_close(found, expected, atol=5e-2 if is_rounded else 1e-4, rtol=0)
    assert (found - expected).abs().mean() < (5e-3 if is_rounded else 2e-5)
    other = wanted(Reference(plain), tokens)[: len(found)]
    assert (found - other).abs().mean() > 10 * (found - expected).abs().mean()  # or the checkpoint was read as if it were plain

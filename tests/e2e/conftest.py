"""Tiny checkpoints of each family, made once, and what transformers says about them."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from runtime.options import facts
from runtime.scheduling.speculation.pace import Pace
from tests.models.make import make_checkpoint

Generate = Callable[[str, list[int], int], list[int]]


@pytest.fixture(scope="module", autouse=True)
def _ranks_start_fast(forked_children: None) -> None:
    """An import of torch by each rank would take most of the time of these tests."""


@pytest.fixture(scope="module", autouse=True)
def _engines_share_a_gpu() -> Iterator[None]:
    """Several processes of tests take the same GPU, where there is one. Tests of options, which the same
    process may run afterwards, are about whole ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(facts.DEVICES, "cuda", replace(facts.DEVICES["cuda"], memory_fraction=0.05))
        yield


@pytest.fixture
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts with some chance are made, whatever steps take on this machine at the moment."""
    monkeypatch.setattr(Pace, "count", lambda self, chance, skipped, most: most if chance > 0.1 else 0)
    monkeypatch.setattr(Pace, "worth", lambda self, gains: len(gains) if gains and gains[0] > 0.1 else 0)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> folder"""

    @cache
    def make(family: str) -> Path:
        return make_checkpoint(family, tmp_path_factory.mktemp(family))

    return make


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Generate:
    """(family, prompt, new tokens) -> what transformers generates: fp32, greedy, without stopping"""

    @cache
    def load(family: str) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32).eval()

    @cache
    def generate(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(count):
                logits = load(family)(tokens).logits[0, -1]
                tokens = torch.cat([tokens, logits.argmax().view(1, 1)], dim=1)
        return tokens[0, len(prompt) :].tolist()

    return lambda family, prompt, count: generate(family, tuple(prompt), count)

"""The head in float32 behind layers in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.layers.embedding import Head
from runtime.layers.sampling.sampler import clean
from tests.devices.drive import start
from tests.models.make import make_checkpoint


class Gathered:
    """One of several ranks of a head, with what the others have made."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.given: list[torch.Tensor] = []
        self.parts: list[torch.Tensor] = []

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self.given.append(x)
        return torch.cat(self.parts or [x] * self.size, dim)


@pytest.mark.parametrize("vocab", [12, 11, 9, 5])
def test_ranks_find_the_largest_of_their_logits(vocab: int) -> None:
    """The first of equal ones, past what is no number, and not in the rows past the vocabulary."""
    size, generator = 4, torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 3, (50, vocab), generator=generator).float()
    logits[0] = torch.nan
    logits[1, vocab // 2] = torch.inf
    logits[2] = -torch.inf
    rows = -(-vocab // size)
    padded = torch.nn.functional.pad(logits, (0, rows * size - vocab), value=99.0)
    heads: list[Any] = []
    for rank in range(size):
        head: Any = Head.__new__(Head)
        head.ranks, head.vocab_size = Gathered(rank, size), vocab
        heads.append(head)
    parts = padded.chunk(size, 1)
    for head, part in zip(heads, parts, strict=True):
        head.largest(part.clone())
    gathered = [head.ranks.given[0] for head in heads]
    for head, part in zip(heads, parts, strict=True):
        head.ranks.parts = gathered
        assert torch.equal(head.largest(part.clone()), clean(logits.clone()).argmax(1))
    assert gathered[0].shape == (1, 2, 50)


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

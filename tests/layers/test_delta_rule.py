"""Chunks of the delta rules against the same tokens one by one, decays being of heads or of channels."""

import pytest
import torch
from torch import Tensor

from runtime.layers.recurrent.delta_rule import delta_chunks, delta_step, unit

HEADS, KEY, VALUE = 2, 8, 12


def random_inputs(num_tokens: int, decays: int) -> tuple[Tensor, ...]:
    """Queries, keys, values, log decays [T, H, decays], of which some are so fast that quotients of them
    overflow, and rates."""
    torch.manual_seed(num_tokens + decays)
    q, k = (unit(torch.randn(num_tokens, HEADS, KEY)) for _ in range(2))
    g = -torch.rand(num_tokens, HEADS, decays) * torch.tensor([0.01, 8.0]).view(1, HEADS, 1)
    return q, k, torch.randn(num_tokens, HEADS, VALUE), g, torch.rand(num_tokens, HEADS)


@pytest.mark.parametrize("decays", [1, KEY], ids=["head", "channel"])
@pytest.mark.parametrize("num_tokens", [1, 16, 65, 1100], ids="{} tokens".format)
def test_chunks_equal_single_tokens(decays: int, num_tokens: int) -> None:
    inputs = random_inputs(num_tokens, decays)
    state = after = torch.randn(HEADS, KEY, VALUE)
    outs = []
    for token in range(num_tokens):
        out, after = delta_step(tuple(x[token].unsqueeze(0) for x in inputs), after.reshape(1, *state.shape))
        outs.append(out)
    chunked, chunked_after = delta_chunks(inputs, state)
    torch.testing.assert_close(chunked, torch.cat(outs), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(chunked_after, after.reshape(state.shape), atol=2e-5, rtol=1e-4)

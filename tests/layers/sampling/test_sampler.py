"""The sampler against a slow reference in fp64 that follows the definitions one token at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.sampling.sampler import (
    FAR,
    NUM_CANDIDATES,
    clean,
    host_uniform,
    logprobs,
    sample_tokens,
    uniform,
)

Settings = tuple[float, float, int, float]  # temperature, top_p, top_k, min_p


def draw(rows: list[Settings], uniforms: list[float]) -> SamplingInputs:
    temperature, top_p, top_k, min_p = zip(*rows, strict=True)
    return SamplingInputs(
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_p, dtype=torch.float32),
        torch.tensor(top_k),
        torch.tensor(min_p, dtype=torch.float32),
        torch.tensor(uniforms, dtype=torch.float64),
    )


def kept_probabilities(logits: list[float], setting: Settings) -> dict[int, float]:
    """What may be drawn, with its probability, by the book."""
    temperature, top_p, top_k, min_p = setting
    largest = max(logits)
    weights = [math.exp((value - largest) / temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if top_k > 0:
        order = order[:top_k]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if kept and top_p < 1 and mass >= top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    kept = [i for i in kept if weights[i] >= min_p]
    return {i: weights[i] / sum(weights[j] for j in kept) for i in kept}


SETTINGS: list[Settings] = [
    (1.0, 1.0, 0, 0.0),
    (0.5, 1.0, 0, 0.0),
    (2.0, 0.9, 0, 0.0),
    (1.0, 0.3, 0, 0.0),
    (1.0, 1.0, 3, 0.0),
    (1.0, 0.7, 5, 0.0),
    (1.0, 1.0, 0, 0.2),
    (1.0, 0.9, 10, 0.1),
    (1.0, 1e-6, 0, 0.0),
    (1.0, 1.0, 1, 0.0),
    (1.0, 0.8, 10**9, 0.0),
    (100.0, 0.99, 0, 0.0),
]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("vocab", [11, 2 * NUM_CANDIDATES])
def test_distribution(setting: Settings, vocab: int) -> None:
    """Evenly spread random numbers give each token its probability, to one part in the number of draws."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    num = 4096
    uniforms = [(i + 0.5) / num for i in range(num)]
    tokens = sample_tokens(logits.expand(num, -1), draw([setting] * num, uniforms))
    found = torch.bincount(tokens, minlength=vocab).double() / num
    expected = torch.zeros(vocab, dtype=torch.float64)
    for token, probability in kept_probabilities(logits.double().tolist(), setting).items():
        expected[token] = probability
    assert (found - expected).abs().max() <= 2 / num
    assert set(tokens.tolist()) <= set(expected.nonzero().squeeze(1).tolist())


def test_candidates_and_full_sort_agree() -> None:
    """A flat row needs more than the candidates; the steep ones beside it do not, and no one's token
    changes."""
    torch.manual_seed(0)
    logits = torch.cat((torch.randn(4, 3000) * 0.01, torch.randn(4, 3000) * 8))
    rows: list[Settings] = [
        (1.0, 0.9, 0, 0.0),
        (1.0, 0.95, 1500, 0.0),
        (1.0, 0.5, 0, 0.0),
        (1.0, 1.0, 2000, 0.0),
    ] * 2
    uniforms = [0.1, 0.9, 0.5, 0.99999, 0.3, 0.7, 0.0, 0.999]
    together = sample_tokens(logits, draw(rows, uniforms)).tolist()
    alone = [
        int(sample_tokens(logits[i : i + 1], draw(rows[i : i + 1], uniforms[i : i + 1]))) for i in range(8)
    ]
    assert together == alone
    for i in range(8):
        assert together[i] in kept_probabilities(logits[i].double().tolist(), rows[i])


finite = st.floats(min_value=0, max_value=1, exclude_max=True)
setting = st.tuples(
    st.sampled_from([0.0, 1e-300, 1e-38, 1e-6, 0.7, 1.0, 100.0]),
    st.sampled_from([1e-300, 1e-6, 0.5, 0.999999, 1.0]),
    st.sampled_from([0, 1, 2, 255, 256, 257, 2**31 - 1]),
    st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
)
value = st.sampled_from([0.0, 1.0, -1.0, 3e38, -3e38, math.inf, -math.inf, math.nan, 1e-40])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(setting, finite, st.lists(value, min_size=5, max_size=5)), min_size=1, max_size=5),
    st.booleans(),
)
def test_never_raises(rows: list[tuple[Settings, float, list[float]]], is_wide: bool) -> None:
    """Whatever passes the door, and whatever the model says, a step gives tokens of the vocabulary."""
    logits = torch.tensor([values for _, _, values in rows]).repeat(1, 60 if is_wide else 1)
    tokens = sample_tokens(
        clean(logits), draw([row for row, _, _ in rows], [min(u, 1 - 2**-52) for _, u, _ in rows])
    )
    assert all(0 <= token < logits.shape[1] for token in tokens.tolist())
    found = logprobs(logits, tokens, logits.shape[1])
    assert not found.chosen.isnan().any() and not found.top.isnan().any()


def test_greedy_rows_among_random_ones() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [2.0, 0.0, 1.0]])
    assert sample_tokens(logits, draw([(0.0, 1.0, 0, 0.0), (1.0, 1.0, 0, 0.0)], [0.5, 0.999])).tolist() == [
        1,
        2,
    ]


def test_clean() -> None:
    logits = torch.tensor([[math.nan, math.inf, -math.inf, 2.0]])
    assert clean(logits).tolist() == [
        [-torch.tensor(FAR).item(), torch.tensor(FAR).item(), -torch.tensor(FAR).item(), 2.0]
    ]


def splitmix(state: int) -> int:
    """The published finaliser, in Python's integers."""
    mask = 2**64 - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31))
@settings(max_examples=200, deadline=None)
def test_uniform_is_splitmix(seed: int, position: int) -> None:
    found = float(uniform(torch.tensor([seed]), torch.tensor([position])))
    bits = splitmix((splitmix(seed % 2**64) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64)
    assert found == (bits >> 12) * 2.0**-52 and 0 <= found < 1
    assert host_uniform(np.array([seed]), np.array([position])).tolist() == [found]


def test_uniform_is_uniform() -> None:
    """Mean, variance and neighbours: of a run of positions, and of a run of seeds at one position."""
    for numbers in (
        uniform(torch.full((20000,), 42), torch.arange(20000)),
        uniform(torch.arange(20000), torch.full((20000,), 3)),
    ):
        assert abs(float(numbers.mean()) - 1 / 2) < 0.01
        assert abs(float(numbers.var()) - 1 / 12) < 0.005
        assert abs(float(torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1])) < 0.03


def test_logprobs() -> None:
    logits = torch.randn(3, 50)
    expected = logits.double().log_softmax(-1)
    found = logprobs(logits, torch.tensor([4, 0, 49]), 5)
    torch.testing.assert_close(
        found.chosen.double(), expected[torch.arange(3), torch.tensor([4, 0, 49])], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(found.top.double(), expected.topk(5).values, atol=1e-5, rtol=0)
    assert found.top_ids.tolist() == expected.topk(5).indices.tolist()
    assert logprobs(logits, torch.tensor([0, 0, 0]), 0).top_ids.shape == (3, 0)

"""Acceptance of drafts beyond what is sampled: how often, and what comes where none is accepted."""

import numpy as np
import pytest
import torch

from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.sampling.sampler import host_uniform, sample_tokens, token_chances
from runtime.layers.sampling.thresholds import Thresholds
from runtime.layers.sampling.verify import DraftRows

COUNT = 20_000
CHANCES = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
# of a share of COUNT that is expected to be p: four standard deviations
BOUND = 4 * 0.5 / COUNT**0.5


def inputs_of(count: int, numbers: np.ndarray, **fields: float) -> SamplingInputs:
    kept = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | fields
    dtypes = {"top_k": torch.int64}
    columns = {
        name: torch.full((count,), value, dtype=dtypes.get(name, torch.float32))
        for name, value in kept.items()
    }
    return SamplingInputs(**columns, uniform=torch.from_numpy(numbers))  # type: ignore[arg-type]


def accepted(drafts: list[int], thresholds: Thresholds, **fields: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of COUNT sequences with sibling drafts behind their last token: what is sampled, and what comes
    with these thresholds."""
    nodes = len(drafts) + 1
    seeds = np.repeat(np.arange(COUNT), nodes)
    positions = np.tile([7, *[8] * len(drafts)], COUNT)
    logits = torch.from_numpy(np.log(CHANCES)).float().repeat(COUNT * nodes, 1)
    inputs = inputs_of(COUNT * nodes, host_uniform(seeds, positions), **fields)
    sampled = sample_tokens(logits, inputs)
    rows = DraftRows(
        np.arange(COUNT) * nodes,
        np.full(COUNT, nodes),
        np.tile([-1, *drafts], (COUNT, 1)),
        np.tile([-1, *[0] * len(drafts)], (COUNT, 1)),
        len(drafts) == 1,
    )
    found = thresholds.accept(logits, inputs, sampled, rows, seeds, positions)
    assert (found[1::nodes] == sampled[1::nodes]).all(), "nothing follows the drafts"
    return sampled[::nodes].numpy(), found[::nodes].numpy()


def shares(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens, minlength=len(CHANCES)) / COUNT


@pytest.mark.parametrize("draft", [0, 1, 4])
@pytest.mark.parametrize("acc", [0.9, 0.5, 0.2])
def test_probabilities_are_raised(draft: int, acc: float) -> None:
    """A draft of probability p comes with min(1, p / acc), the others in the proportions that they have."""
    sampled, found = accepted([draft], Thresholds(acc=acc))
    expected = np.delete(CHANCES, draft) / (1 - CHANCES[draft])
    chance = min(1.0, CHANCES[draft] / acc)
    tokens = shares(found)
    assert abs(tokens[draft] - chance) < BOUND
    assert np.abs(np.delete(tokens, draft) - (1 - chance) * expected).max() < BOUND
    is_other = found != draft
    assert (found[is_other] == sampled[is_other]).all() and (found[sampled == draft] == draft).all()


@pytest.mark.parametrize(("single", "is_taken"), [(0.31, False), (0.3, True), (0.0, True)])
def test_likely_drafts_are_accepted(single: float, is_taken: bool) -> None:
    sampled, found = accepted([1], Thresholds(single=single - 1e-6))
    assert (found == 1).all() if is_taken else (found == sampled).all()


def test_siblings_share_the_chance() -> None:
    """The first has min(1, p / acc), the second what their sum has beyond that, the rest are as before."""
    _, found = accepted([2, 1, 4], Thresholds(acc=0.5))
    tokens = shares(found)
    assert np.abs(tokens[[2, 1, 4]] - [0.3, 0.6, 0.1]).max() < BOUND and tokens[[0, 3]].sum() == 0
    _, found = accepted([2, 4], Thresholds(acc=0.5))
    tokens = shares(found)
    assert np.abs(tokens[[2, 4]] - [0.3, 0.1]).max() < BOUND
    assert np.abs(tokens[[0, 1, 3]] - 0.6 * np.array([0.5, 0.375, 0.125])).max() < BOUND


def test_exact_thresholds_change_nothing() -> None:
    for drafts in ([1], [2, 1, 4]):
        sampled, found = accepted(drafts, Thresholds())
        assert (found == sampled).all()


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_p": 0.65}, {"min_p": 0.5}])
def test_filtered_tokens_have_no_chance(fields: dict[str, float]) -> None:
    """No token that top_k, top_p or min_p leaves out is accepted, whatever the thresholds are."""
    sampled, found = accepted([2], Thresholds(single=0.0, acc=0.01), **fields)
    assert (found == sampled).all() and set(sampled.tolist()) == {0, 1}
    _, found = accepted([1], Thresholds(acc=0.5), **fields)
    assert abs(shares(found)[1] - 0.3 / 0.7 / 0.5) < BOUND


def test_greedy_rows_are_exact() -> None:
    sampled, found = accepted([3], Thresholds(single=0.0, acc=0.01), temperature=0.0)
    assert (found == 0).all() and (sampled == 0).all()


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.5}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.3}])
def test_chances_are_those_of_the_sampler(fields: dict[str, float]) -> None:
    logits = torch.from_numpy(np.log(CHANCES)).float().repeat(COUNT, 1)
    inputs = inputs_of(COUNT, (np.arange(COUNT) + 0.5) / COUNT, **fields)
    counted = shares(sample_tokens(logits, inputs).numpy())
    tokens = torch.arange(len(CHANCES))
    found = token_chances(logits, inputs, torch.zeros_like(tokens), tokens)
    assert np.abs(found.numpy() - counted).max() < 2 / COUNT

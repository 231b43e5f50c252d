"""Sampling without a sort, bans and penalties, against plain torch."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.devices.cuda.kernels.logits import apply_penalties, mask
from runtime.devices.cuda.kernels.sampling import sample
from runtime.devices.operands import Seen
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.sampling import sampler
from runtime.layers.sampling.penalties import Counts
from tests.devices.cuda.torch_device import TORCH_DEVICE

Settings = tuple[float, float, int, float]  # temperature, top_p, top_k, min_p
CLOSE = 1e-6  # of the sum: as far as float32 weights of two devices may move a boundary


def sampling_inputs(rows: list[Settings], uniforms: list[float]) -> SamplingInputs:
    """Sampling inputs of some rows."""
    kinds = (torch.float32, torch.float32, torch.int64, torch.float32)
    temperature, top_p, top_k, min_p = (
        torch.tensor(column, dtype=kind).to(TORCH_DEVICE)
        for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)
    )
    return SamplingInputs(
        temperature, top_p, top_k, min_p, torch.tensor(uniforms, dtype=torch.float64).to(TORCH_DEVICE)
    )


def shares(logits: Tensor, setting: Settings) -> tuple[Tensor, Tensor]:
    """Of one row: ids in the order they are drawn in, and the weights that are kept, float64; ties in the
    order of ids."""
    temperature, top_p, top_k, min_p = setting
    weights = ((logits - logits.max()) / temperature).exp()
    if not (0 < top_k < len(logits) or top_p < 1):
        return torch.arange(len(logits)), (weights * (weights >= min_p)).double()
    weights, ids = weights.sort(descending=True, stable=True)
    kept = weights.double()
    if top_k:
        kept[top_k:] = 0
    if top_p < 1:
        before = kept.cumsum(0) - kept
        kept[1:] *= (before < torch.tensor(top_p).double() * kept.sum())[1:]
    return ids, kept * (weights >= min_p)


def check(logits: Tensor, rows: list[Settings], uniforms: list[float], chunk: int, held: int) -> None:
    """Compares tokens with those of the cpu."""
    found = sample(logits.to(TORCH_DEVICE), sampling_inputs(rows, uniforms), chunk, held).tolist()
    for line, setting, uniform, token in zip(logits, rows, uniforms, found, strict=True):
        if setting[0] == 0:
            assert token == int(line.argmax())
            continue
        ids, kept = shares(line, setting)
        ends = kept.cumsum(0) / kept.sum()
        torch_device = int((ids == token).nonzero())
        assert kept[torch_device] > 0, (setting, uniform, token)
        assert (
            ends[torch_device] - kept[torch_device] / kept.sum() - CLOSE
            <= uniform
            <= ends[torch_device] + CLOSE
        ), (setting, uniform, token)


SETTINGS: list[Settings] = [
    (0.0, 1.0, 0, 0.0),
    (1.0, 1.0, 0, 0.0),
    (0.5, 0.9, 0, 0.0),
    (1.0, 0.3, 0, 0.0),
    (1.0, 1.0, 3, 0.0),
    (1.0, 0.7, 5, 0.0),
    (1.0, 1.0, 0, 0.2),
    (1.0, 0.9, 10, 0.1),
    (1.0, 1e-6, 0, 0.0),
    (1.0, 0.8, 10**9, 0.0),
    (50.0, 0.99, 0, 0.0),
    (1.0, 0.95, 140, 0.0),
]


@pytest.mark.parametrize("spread", [0.01, 4.0])
def test_same_token_as_a_sort(spread: float) -> None:
    """Flat rows have more candidates than registers hold; steep ones few."""
    generator = torch.Generator().manual_seed(int(spread * 100))
    logits = torch.randn(len(SETTINGS), 150, generator=generator) * spread
    check(
        logits,
        SETTINGS,
        torch.rand(len(SETTINGS), generator=generator, dtype=torch.float64).tolist(),
        64,
        128,
    )


def test_ties_go_by_id() -> None:
    """What top_k and top_p cut between equals, and which of them a number falls on."""
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0, 2.0, 1.0, -5.0])
    rows: list[Settings] = [(1.0, 1.0, 3, 0.0)] * 3 + [(1.0, 1.0, 5, 0.0)] * 2 + [(1.0, 0.3, 0, 0.0)] * 2
    uniforms = [0.1, 0.5, 0.99, 0.2, 0.999, 0.1, 0.9]
    check(logits.expand(len(rows), -1), rows, uniforms, 16, 16)
    assert sample(
        logits.expand(len(rows), -1).to(TORCH_DEVICE), sampling_inputs(rows, uniforms), 16, 16
    ).tolist() == [1, 2, 4, 1, 0, 1, 2]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, where a GPU says infinity
def test_numbers_at_the_edges() -> None:
    """Uniforms 0 and just below 1, logits of all sizes that `clean` leaves."""
    logits = sampler.clean(
        torch.tensor([[float("nan")] * 5, [float("inf"), 0, 0, float("-inf"), 1], [3.4e38, -3.4e38, 0, 1, 2]])
    )
    for setting in ((1.0, 1.0, 0, 0.0), (1.0, 0.5, 0, 0.0), (1e-38, 0.9, 2, 0.5), (1.0, 1.0, 2, 1.0)):
        for uniform in (0.0, 1 - 2.0**-52):
            check(logits, [setting] * 3, [uniform] * 3, 16, 16)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_row(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, -2.0, -30.0]), min_size=1, max_size=40))
    setting = (
        data.draw(st.sampled_from([0.0, 0.3, 1.0])),
        data.draw(st.sampled_from([1e-9, 0.4, 0.9, 1.0])),
        data.draw(st.sampled_from([0, 1, 2, 7, 39])),
        data.draw(st.sampled_from([0.0, 0.3, 1.0])),
    )
    check(torch.tensor([values]), [setting], [data.draw(st.floats(0, 1, exclude_max=True))], 16, 16)


def test_company_changes_nothing() -> None:
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(1))
    rows: list[Settings] = [(1.0, 0.9, 0, 0.0), (0.0, 1.0, 0, 0.0), (1.0, 1.0, 0, 0.0)]
    uniforms = [0.3, 0.9, 0.5]
    together = sample(logits.to(TORCH_DEVICE), sampling_inputs(rows, uniforms), 32, 64).tolist()
    assert together == [
        int(
            sample(
                logits[i : i + 1].to(TORCH_DEVICE),
                sampling_inputs(rows[i : i + 1], uniforms[i : i + 1]),
                32,
                64,
            )
        )
        for i in range(3)
    ]


def test_mask() -> None:
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(0)).to(TORCH_DEVICE)
    bits = torch.randint(
        -(2**31), 2**31 - 1, (2, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(1)
    ).to(TORCH_DEVICE)
    rows = torch.tensor([1, 3], device=TORCH_DEVICE)
    allowed = (bits.unsqueeze(2) >> torch.arange(32, device=TORCH_DEVICE) & 1).flatten(1)[:, :70].bool()
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~allowed, sampler.BANNED)
    mask(logits, rows, bits)
    assert torch.equal(logits, expected) and (logits == sampler.BANNED).any()


def test_penalties() -> None:
    """As layers/sampling/penalties.py has them; other rows stay."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 90, generator=generator) * 3).to(TORCH_DEVICE)
    counts = Counts(90, TORCH_DEVICE)
    counts.generated = torch.randint(0, 3, (4, 90), dtype=torch.int32, generator=generator).to(TORCH_DEVICE)
    counts.in_prompt = torch.rand(4, 90, generator=generator).to(TORCH_DEVICE) < 0.3
    counts.penalties = torch.tensor([[0.5, 0.2, 1.3], [0, 0, 0.7], [1, 0, 1], [0, 2, 1]], device=TORCH_DEVICE)
    counts.rows = {7: 2, 9: 0}
    expected = logits.clone()
    counts.apply(expected, [0, 2], [7, 9], {})
    places, index = (torch.tensor(x, device=TORCH_DEVICE) for x in ([0, 2], [2, 0]))
    apply_penalties(logits, places, Seen(counts.generated, counts.in_prompt, counts.penalties), index)
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)

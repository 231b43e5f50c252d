"""What the kernels make of rows of logits, against layers/sampling, at every instruction set of this
machine."""

import math

import pytest
import torch
from torch import Tensor

from runtime.devices.cpu.kernels import library
from runtime.devices.cpu.kernels.levels import Level, supported_levels
from runtime.devices.cpu.matrices import Threads
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.cpu.sampling import CpuLogitsOps
from runtime.devices.operands import Seen, TokenMasks
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.fused_ops import penalise
from runtime.layers.sampling.sampler import BANNED, clean, logprobs, mask, sample_tokens, uniform

BUILT = [level for level in supported_levels() if level.path.is_file()]
VOCAB = 20_011  # three blocks, and no whole number of vectors
INF, NAN = math.inf, math.nan


@pytest.fixture(params=BUILT, ids=lambda level: level.name)
def ops(request: pytest.FixtureRequest) -> CpuLogitsOps:
    level: Level = request.param
    return CpuLogitsOps(Threads(library.Library(level), 2))


def rows_of(count: int, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(count)) * scale


def inputs_of(
    count: int, temperature: float, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, at: int = 0
) -> SamplingInputs:
    ones = torch.ones(count)
    numbers = uniform(torch.arange(count), torch.arange(count) + at)
    return SamplingInputs(
        ones * temperature, ones * top_p, torch.full((count,), top_k), ones * min_p, numbers
    )


def odd_rows() -> Tensor:
    """Ties, numbers that are none, banned tokens, and maxima at both ends."""
    rows = rows_of(8)
    rows[0, [7, 11_000, 19_999]] = 50.0
    rows[1, 5], rows[1, 100] = NAN, INF
    rows[2] = NAN
    rows[3] = -INF
    rows[4] = 1.5
    rows[5, :] = 2 * BANNED
    rows[5, [3, 20_010]] = BANNED
    rows[6, 20_010] = 60.0
    rows[7, 0] = 60.0
    return rows


def test_greedy_takes_the_first_of_the_largest(ops: CpuLogitsOps) -> None:
    for rows in (odd_rows(), rows_of(1), rows_of(3, 5), rows_of(2, 1)):
        assert torch.equal(ops.choose(rows, None), clean(rows.clone()).argmax(1))


@pytest.mark.parametrize(
    "sampling",
    [
        (1.0,),
        (0.7, 1.0, 0, 0.05),
        (0.7, 0.9),
        (1.0, 0.95),
        (5.0, 0.99),  # nearly flat: no token is likely
        (0.7, 1.0, 50),
        (0.05, 0.99, 30),  # fewer than 30 are likely
        (2.0, 0.8, 7_000),
        (5.0, 0.95, 9_000, 0.05),
        (9.0, 0.999),
        (0.6, 0.95, 20, 0.1),
        (1.0, 1.0, VOCAB + 5),
        (1e-4, 0.5),
        (0.0, 0.5, 3),
    ],
    ids=str,
)
def test_the_tokens_of_the_specification(ops: CpuLogitsOps, sampling: tuple[float, ...]) -> None:
    """Sums differ in their last digits, so a random number that falls between may find the neighbour."""
    temperature, top_p, top_k, min_p = (*sampling, *(0.0, 1.0, 0, 0.0)[len(sampling) :])
    wrong = 0
    for at in range(2):
        rows = rows_of(8, scale=2.0 + 2 * at)
        inputs = inputs_of(8, temperature, top_p, int(top_k), min_p, at)
        wrong += int((ops.choose(rows, inputs) != sample_tokens(rows, inputs)).sum())
    assert wrong <= 1


def test_odd_rows_are_sampled_as_the_specification_says(ops: CpuLogitsOps) -> None:
    rows = odd_rows()
    for inputs in (inputs_of(8, 1.0), inputs_of(8, 0.0)):
        assert torch.equal(ops.choose(rows, inputs), sample_tokens(clean(rows.clone()), inputs))
    for inputs in (inputs_of(8, 0.5, 0.9), inputs_of(8, 1.0, 1.0, 2)):
        tokens, wanted = ops.choose(rows, inputs), sample_tokens(clean(rows.clone()), inputs)
        assert torch.equal(tokens[[1, 5, 6, 7]], wanted[[1, 5, 6, 7]])
        assert tokens[0] in (7, 11_000, 19_999), "torch orders equal candidates as it likes"
    assert ops.choose(rows, inputs_of(8, 1.0, 1.0, 1)).tolist()[:5] == [7, 100, 0, 0, 0]


def test_equal_tokens_are_taken_in_the_order_of_the_vocabulary(ops: CpuLogitsOps) -> None:
    """Half of them by top-p, or as many as top-k says."""
    rows = torch.full((8, VOCAB), 2.5)
    for top_p, top_k, kept in ((0.5, 0, VOCAB // 2 + 1), (1.0, 1_000, 1_000)):
        inputs = inputs_of(8, 1.0, top_p, top_k)
        assert torch.equal(ops.choose(rows, inputs), (inputs.uniform * kept).long())


def test_rows_of_all_kinds_share_a_step(ops: CpuLogitsOps) -> None:
    """A row's token is the same alone, and whatever the number of threads."""
    rows = rows_of(6)
    inputs = SamplingInputs(
        torch.tensor([0.0, 1.0, 0.7, 0.0, 1.3, 0.9]),
        torch.tensor([1.0, 1.0, 0.9, 0.4, 1.0, 0.99]),
        torch.tensor([0, 0, 0, 5, 40, 0]),
        torch.tensor([0.0, 0.1, 0.0, 0.0, 0.0, 0.2]),
        uniform(torch.arange(6), torch.arange(6)),
    )
    tokens = ops.choose(rows, inputs)
    assert torch.equal(tokens, sample_tokens(rows, inputs))
    for threads in (1, 3):
        others = CpuLogitsOps(Threads(ops.threads.library, threads))
        assert torch.equal(others.choose(rows, inputs), tokens)
    for row in range(6):
        alone = SamplingInputs(
            inputs.temperature[row : row + 1],
            inputs.top_p[row : row + 1],
            inputs.top_k[row : row + 1],
            inputs.min_p[row : row + 1],
            inputs.uniform[row : row + 1],
        )
        assert ops.choose(rows[row : row + 1], alone) == tokens[row]


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 12)])
def test_tokens_come_as_often_as_they_are_likely(ops: CpuLogitsOps, top_p: float, top_k: int) -> None:
    """A chi-square test over 10,000 tokens. 99.99 % of correct samplers pass it, and the numbers are
    fixed."""
    vocab, count = 60, 10_000
    row = rows_of(1, vocab, 1.2)
    probabilities, order = row[0].double().softmax(0).sort(descending=True)
    kept = probabilities.cumsum(0) - probabilities < top_p
    if top_k:
        kept[top_k:] = False
    wanted = (probabilities * kept / (probabilities * kept).sum() * count)[kept]
    found = torch.bincount(
        ops.choose(row.expand(count, vocab), inputs_of(count, 1.0, top_p, top_k)), minlength=vocab
    )[order]
    assert found[~kept].sum() == 0
    statistic = float(((found[kept] - wanted) ** 2 / wanted).sum())
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 8


def test_log_probabilities(ops: CpuLogitsOps) -> None:
    for rows, width in ((rows_of(3), 5), (rows_of(2), 0), (rows_of(2), 300), (rows_of(2, 9), 20)):
        targets = torch.tensor([1, rows.shape[1] - 1, 4])[: len(rows)]
        chosen, ids, top = ops.logprobs(rows, targets, width)
        wanted = logprobs(rows, targets, width)
        assert torch.equal(ids, wanted.top_ids)
        torch.testing.assert_close(top, wanted.top, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(chosen, wanted.chosen, rtol=1e-6, atol=1e-6)
    rows = torch.zeros(1, 40)
    assert ops.logprobs(rows, torch.tensor([3]), 4)[1].tolist() == [[0, 1, 2, 3]], "of equal ones the first"
    odd, targets = odd_rows(), torch.tensor([5, 5, 5, 5, 5, 3, 5, 5])
    assert torch.isfinite(ops.logprobs(odd, targets, 3)[0]).all()


def test_masks(ops: CpuLogitsOps) -> None:
    rows, places = rows_of(4), torch.tensor([1, 3])
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (2, -(-VOCAB // 32)), dtype=torch.int32, generator=generator)
    wanted = rows.clone()
    mask(wanted, places, bits)
    ops.mask(rows, places, bits)
    assert torch.equal(rows, wanted)


def test_masked_rows_may_have_any_numbers(ops: CpuLogitsOps) -> None:
    """What is banned stays below what is allowed, also where none of it is a number."""
    rows = torch.cat((odd_rows(), torch.full((1, VOCAB), -torch.inf), torch.full((1, VOCAB), torch.nan)))
    places = torch.arange(len(rows))
    generator = torch.Generator().manual_seed(0)
    shape = (len(rows), -(-VOCAB // 32))
    bits = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)
    wanted = clean(rows.clone())
    mask(wanted, places, bits)
    spread = torch.empty(len(rows), 2 * VOCAB)[:, ::2].copy_(rows)
    ops.mask(rows, places, bits)
    CpuOps(torch.float32, ops.threads).mask(spread, places, bits)
    for masked in (rows, spread):
        assert torch.equal(ops.choose(masked, None), wanted.argmax(dim=1))


def some_bits(shape: tuple[int, int]) -> Tensor:
    """Masks as grammars make them: nothing, all, few tokens, whole words, and what random bits say."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)
    bits[0] = 0
    bits[1] = -1
    bits[2] = 0
    bits[2, [1, 300, -1]] = torch.tensor([1 << 9, 3, 2], dtype=torch.int32)
    bits[3, :400] = 0
    bits[4, 5:] = 0
    bits[5] *= torch.randint(0, 2, shape[1:], dtype=torch.int32, generator=generator)
    return bits


@pytest.mark.parametrize(
    "sampling",
    [
        None,
        (1.0,),
        (0.7, 1.0, 0, 0.05),
        (0.7, 0.9),
        (5.0, 0.99),
        (0.7, 1.0, 50),
        (2.0, 0.8, 7_000),
        (9.0, 0.999),
    ],
    ids=str,
)
def test_masks_are_read_as_if_they_had_been_written(
    ops: CpuLogitsOps, sampling: tuple[float, ...] | None
) -> None:
    """Masks that `choose` reads lead to the tokens of logits that were masked before, to the bit of the
    sums. Masks of some rows leave the others free, and their logits as they are."""
    for rows in (rows_of(8), odd_rows(), torch.full((8, VOCAB), 2 * BANNED), rows_of(8, 33)):
        bits = some_bits((6, -(-rows.shape[1] // 32)) if rows.shape[1] > 33 else (6, 400))
        bits = bits[:, : -(-rows.shape[1] // 32)].contiguous()
        masks = TokenMasks(torch.tensor([7, 0, 3, 2, 4, 5]), bits)
        masked = rows.clone()
        ops.mask(masked, *masks)
        for at in range(1 if sampling is None else 6):
            inputs = None if sampling is None else inputs_of(len(rows), *sampling, at=at)
            given = rows.clone()
            assert torch.equal(ops.choose(given, inputs, masks), ops.choose(masked, inputs))
            assert torch.equal(given[[1, 6]].view(torch.int32), rows[[1, 6]].view(torch.int32))


def test_penalties(ops: CpuLogitsOps) -> None:
    rows, places, at = rows_of(4), torch.tensor([0, 2]), torch.tensor([1, 2])
    generator = torch.Generator().manual_seed(0)
    seen = Seen(
        torch.randint(0, 3, (3, VOCAB), dtype=torch.int32, generator=generator),
        torch.rand(3, VOCAB, generator=generator) < 0.5,
        torch.tensor([[0.0, 0.0, 1.0], [0.3, 0.7, 1.0], [0.1, -0.2, 1.3]]),
    )
    wanted = rows.clone()
    penalise(wanted, places, seen, at)
    ops.penalise(rows, places, seen, at)
    assert torch.equal(rows[[1, 3]], wanted[[1, 3]])
    torch.testing.assert_close(rows, wanted, rtol=1e-6, atol=1e-6)

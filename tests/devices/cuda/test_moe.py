"""Experts on the GPU: alignment of slots, sums, and routing, against the cpu device."""

import pytest
import torch

from runtime.devices.cpu.moe import CpuExperts
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.cuda import moe as layer
from runtime.devices.cuda.kernels import moe_permute
from runtime.devices.cuda.kernels.launch import INTERPRETER, gpu_of
from runtime.devices.cuda.kernels.moe_permute import NO_EXPERT, moe_align_block_size
from runtime.devices.cuda.kernels.moe_routing import route
from runtime.devices.cuda.moe import CudaExperts
from runtime.layers.moe.routing import route as wanted_route
from runtime.models.config.moe_config import Routing
from tests.devices.cuda.torch_device import DTYPES, HAS_GPU, TORCH_DEVICE, near

EXPERTS = CudaExperts(gpu_of(TORCH_DEVICE) if HAS_GPU else INTERPRETER)
IDS = {  # of five experts: what a step may look like
    "one token": [[2, 0]],
    "all choose one": [[1, 3]] * 17,
    "no expert is here": [[-4, 7], [5, -1], [9, 6]],
    "some are elsewhere": [[0, 9], [4, -2], [-1, 8], [4, 0], [2, 5], [0, 4], [3, 11]] * 2,
    "expert twice": [[3, 3], [1, 1]],
}


def listed(ids: torch.Tensor, size: int, *, fuses: bool = False) -> dict[int, list[int]]:
    """The slots of each expert, in their order; checks the rest of what `moe_align_block_size` promises."""
    tiles = moe_align_block_size(ids, 5, size, fuses=fuses)
    expert_ids, slots, found = tiles.expert_ids.tolist(), tiles.slots.view(-1, size).tolist(), {}
    needed = [owner for owner in expert_ids if owner != NO_EXPERT]
    assert expert_ids == needed + [NO_EXPERT] * (len(expert_ids) - len(needed)) and needed == sorted(needed)
    for owner, line in zip(needed, slots, strict=False):
        real = [slot for slot in line if slot < ids.numel()]
        assert line == real + [ids.numel()] * (size - len(real)) and real
        found.setdefault(owner, []).extend(real)
    return found


@pytest.mark.parametrize("case", IDS)
@pytest.mark.parametrize("size", [16, 32])
def test_slots_are_listed_by_expert(case: str, size: int) -> None:
    flat = [expert for line in IDS[case] for expert in line]
    wanted = {
        expert: [slot for slot, one in enumerate(flat) if one == expert]
        for expert in range(5)
        if expert in flat
    }
    assert listed(torch.tensor(IDS[case], device=TORCH_DEVICE), size) == wanted
    assert listed(torch.tensor(IDS[case], device=TORCH_DEVICE), size, fuses=True) == wanted


def test_few_slots_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted some at a time, by each program for all experts."""
    monkeypatch.setattr(moe_permute, "COUNTED", 8 * 16)
    monkeypatch.setattr(moe_permute, "count_experts_kernel", None)
    ids = torch.randint(-1, 6, (50, 4), generator=torch.Generator().manual_seed(2))
    found = listed(ids.to(TORCH_DEVICE), 16, fuses=True)
    assert found == {expert: torch.nonzero(ids.flatten() == expert).flatten().tolist() for expert in range(5)}


def test_many_slots_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_permute, "PART", 32)
    monkeypatch.setattr(moe_permute, "CHUNK", 16)
    ids = torch.randint(-1, 6, (50, 4), generator=torch.Generator().manual_seed(1))
    found = listed(ids.to(TORCH_DEVICE), 16)
    assert found == {expert: torch.nonzero(ids.flatten() == expert).flatten().tolist() for expert in range(5)}


@pytest.mark.parametrize("single", [0, 1000], ids=["tiles", "single"])
@pytest.mark.parametrize("case", IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_apply(dtype: torch.dtype, case: str, single: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "SINGLE_SLOTS", single)
    generator = torch.Generator().manual_seed(3)
    ids = torch.tensor(IDS[case])
    x = torch.randn(len(ids), 40, generator=generator).to(dtype)
    gate_up, down = (
        torch.randn(5, *shape, generator=generator).div(4).to(dtype) for shape in ((2 * 72, 40), (40, 72))
    )
    weights = torch.rand(ids.shape, generator=generator)
    oracle = CpuExperts(CpuOps(torch.float32))
    wanted = oracle.apply(x.float(), ids, weights, oracle.pack(gate_up.float(), down.float()))
    found = EXPERTS.apply(
        x.to(TORCH_DEVICE),
        ids.to(TORCH_DEVICE),
        weights.to(TORCH_DEVICE),
        EXPERTS.pack(gate_up.to(TORCH_DEVICE), down.to(TORCH_DEVICE)),
    )
    near(found, wanted, dtype, 2)


@pytest.mark.parametrize("case", IDS)
def test_torchs_grouped_product(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against our kernels, also where experts are elsewhere or have no slots."""
    calls, product = [], layer.grouped_mm

    def counted(*args: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        calls.append(offs.tolist())
        found: torch.Tensor = product(*args, offs=offs)
        found[int(offs[-1]) :] = 0.0  # undefined, and the interpreter would warn of what overflows
        return found

    monkeypatch.setattr(layer, "grouped_mm", counted)
    generator, ids = torch.Generator().manual_seed(6), torch.tensor(IDS[case], device=TORCH_DEVICE)
    x = torch.randn(len(ids), 40, generator=generator).bfloat16().to(TORCH_DEVICE)
    packed = EXPERTS.pack(
        *(
            torch.randn(5, *shape, generator=generator).div(4).bfloat16().to(TORCH_DEVICE)
            for shape in ((2 * 72, 40), (40, 72))
        )
    )
    weights = torch.rand(ids.shape, generator=generator).to(TORCH_DEVICE)
    grouped = CudaExperts(EXPERTS.gpu, grouped_from=0)
    near(grouped.apply(x, ids, weights, packed), EXPERTS.apply(x, ids, weights, packed), torch.bfloat16, 2)
    here = ids[(ids >= 0) & (ids < 5)]
    assert calls == [[int((here <= expert).sum()) for expert in range(5)]] * 2
    assert not EXPERTS.takes_grouped(x, 1 << 20, packed), "no card has shown that it pays"
    assert not grouped.takes_grouped(x.float(), 1 << 20, packed)


def test_a_token_does_not_depend_on_its_company() -> None:
    generator = torch.Generator().manual_seed(4)
    x, weights = torch.randn(20, 32, generator=generator), torch.rand(20, 2, generator=generator)
    ids = torch.randint(0, 5, (20, 2), generator=generator)
    packed = EXPERTS.pack(
        torch.randn(5, 64, 32, generator=generator).to(TORCH_DEVICE),
        torch.randn(5, 32, 32, generator=generator).to(TORCH_DEVICE),
    )
    whole = EXPERTS.apply(x.to(TORCH_DEVICE), ids.to(TORCH_DEVICE), weights.to(TORCH_DEVICE), packed)
    order = torch.randperm(20, generator=generator)
    turned = EXPERTS.apply(
        x[order].to(TORCH_DEVICE), ids[order].to(TORCH_DEVICE), weights[order].to(TORCH_DEVICE), packed
    )
    expected = whole[order.to(TORCH_DEVICE)]
    if HAS_GPU:
        assert torch.equal(turned, expected)
    else:  # the interpreter's products are numpy's, whose last bit may depend on the place of a row
        near(turned, expected, torch.float32)


@pytest.mark.parametrize("fusion", ["off", "safe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_output_is_added(dtype: torch.dtype, fusion: str) -> None:
    """As behind the experts, also where no expert is here. The interpreter rounds to 16 bits otherwise than
    torch does."""
    experts = CudaExperts(EXPERTS.gpu, fusion)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    x, shared, *stacks = (
        torch.randn(*shape, generator=generator).div(4).to(dtype).to(TORCH_DEVICE)
        for shape in ((3, 40), (3, 40), (5, 144, 40), (5, 40, 72))
    )
    weights, packed = torch.rand(3, 2, generator=generator).to(TORCH_DEVICE), experts.pack(*stacks)
    for ids in (torch.tensor([[0, 4], [2, -1], [1, 1]]), torch.tensor([[-1, 7]] * 3)):
        places = ids.to(TORCH_DEVICE)
        expected = experts.apply(x, places, weights, packed) + shared
        found = experts.apply_added(x, places, weights, packed, lambda: shared)
        near(found, expected, dtype)
        assert dtype != torch.float32 or torch.equal(found, expected)
    none = experts.apply_added(x[:0], ids[:0].to(TORCH_DEVICE), weights[:0], packed, lambda: shared[:0])
    assert none.shape == (0, 40)


def test_no_tokens() -> None:
    packed = EXPERTS.pack(
        torch.randn(5, 64, 32, device=TORCH_DEVICE), torch.randn(5, 32, 32, device=TORCH_DEVICE)
    )
    none = torch.zeros(0, 2, device=TORCH_DEVICE)
    assert EXPERTS.apply(torch.zeros(0, 32, device=TORCH_DEVICE), none.long(), none, packed).shape == (0, 32)
    assert [
        tensor.shape for tensor in route(torch.zeros(0, 8, device=TORCH_DEVICE), None, Routing(top_k=2))
    ] == [(0, 2), (0, 2)]


ROUTINGS = [
    Routing(top_k=8, normalizes=True),
    Routing(top_k=1),
    Routing(top_k=4, score="sigmoid", normalizes=True, scale=2.5),
    Routing(
        top_k=8,
        score="sigmoid",
        num_groups=8,
        top_groups=4,
        group_score="two largest",
        normalizes=True,
        scale=2.5,
    ),
    Routing(top_k=6, num_groups=6, top_groups=2, scale=16.0),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_route(routing: Routing, has_bias: bool) -> None:
    """Experts in the same order as the cpu's."""
    num = 96 if routing.num_groups == 6 else 128
    logits = torch.randn(5, num, generator=torch.Generator().manual_seed(5)) * 3
    bias = torch.rand(num, generator=torch.Generator().manual_seed(6)) if has_bias else None
    ids, weights = route(logits.to(TORCH_DEVICE), None if bias is None else bias.to(TORCH_DEVICE), routing)
    wanted_ids, wanted = wanted_route(logits, bias, routing)
    assert torch.equal(ids.cpu(), wanted_ids)
    torch.testing.assert_close(weights.cpu(), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_of_equals_the_first_is_chosen(score: str) -> None:
    """torch's topk takes any of them; here it is always the same, and none twice."""
    logits = torch.tensor([[1.0, 3, 3, 2, 3, 3, 0, 3], [5.0] * 8, [-torch.inf] * 7 + [0]])
    ids, _ = route(logits.to(TORCH_DEVICE), None, Routing(top_k=3, score=score))
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [7, 0, 1]]
    ids, _ = route(
        logits.to(TORCH_DEVICE),
        None,
        Routing(top_k=3, score=score, num_groups=4, top_groups=2, group_score="two largest"),
    )
    assert ids.tolist() == [[2, 4, 5], [0, 1, 2], [7, 0, 1]]


# of numpy
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_nothing_is_chosen_outside_by_what_is_no_number() -> None:
    ids, _ = route(torch.full((1, 8), torch.nan, device=TORCH_DEVICE), None, Routing(top_k=2))
    assert bool(((ids >= 0) & (ids < 8)).all())

"""Products that make the norm of their inputs themselves, and routers that align the slots that they fill."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.cuda.fused import CudaFusedOps
from runtime.devices.cuda.kernels.moe_permute import moe_align_block_size
from runtime.devices.cuda.kernels.norm_product import norm_product
from runtime.devices.cuda.moe import CudaExperts, route_counter
from runtime.devices.cuda.ops import CudaOps
from runtime.devices.operands import NormInputs
from runtime.models.config.moe_config import Routing
from tests.devices.cuda.test_gemm import HERE
from tests.devices.cuda.torch_device import DTYPES, TORCH_DEVICE, near


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(TORCH_DEVICE)


def opened(dtype: torch.dtype, fusion: Any = "all") -> CudaFusedOps:
    return CudaFusedOps(CudaOps(dtype, HERE, fusion=fusion))


def given(rows: int, ins: int, dtype: torch.dtype) -> NormInputs:
    """Rows with strides, as the parts of a larger product have them."""
    x, residual = randn(rows, 2 * ins, dtype=dtype)[:, :ins], randn(rows, ins + 8, dtype=dtype)[:, 8:]
    return NormInputs(x, residual, randn(ins, dtype=dtype), 1e-5)


def unfused(inputs: NormInputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(norm, x + residual) of the kernel that makes nothing else."""
    x, residual, weight, eps = inputs
    return opened(dtype).ops.add_rms_norm(x, residual.clone(), weight, eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "ins"), [(1, 96), (5, 300), (16, 512)])
def test_a_gate_of_a_norm(rows: int, ins: int, dtype: torch.dtype) -> None:
    """The sum is the same to the bit; the residual stays."""
    inputs, weight = given(rows, ins, dtype), randn(2 * 150, ins, dtype=dtype) / 16
    kept = inputs.residual.clone()
    found = opened(dtype).gated_product_of_norm(inputs, weight, "silu")
    assert found is not None and torch.equal(inputs.residual, kept)
    normed, total = unfused(inputs, dtype)
    assert torch.equal(found[1], total)
    gate, up = (normed.double() @ weight.double().T).chunk(2, 1)
    near(found[0], torch.nn.functional.silu(gate) * up, dtype, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_router_of_a_norm(dtype: torch.dtype) -> None:
    """Experts read the norm too: all programs write a part of it, here three."""
    inputs, weight = given(4, 600, dtype), randn(300, 600, dtype=dtype) / 16
    found = opened(dtype).router_logits_of_norm(inputs, weight)
    assert found is not None
    logits, total, x = found
    normed, wanted = unfused(inputs, dtype)
    assert logits.dtype == torch.float32 and torch.equal(total, wanted)
    near(x, normed.double(), dtype, 1)
    near(logits, normed.double() @ weight.double().T, dtype, 4)


@pytest.mark.parametrize(
    ("rows", "dtype", "fusion", "kind"),
    [
        pytest.param(17, torch.float32, "all", "silu", id="more rows than a tile"),
        pytest.param(4, torch.float16, "all", "silu", id="float16 would overflow"),
        pytest.param(4, torch.float32, "safe", "silu", id="safe"),
        pytest.param(4, torch.float32, "all", "gelu_tanh", id="another gate"),
    ],
)
def test_what_is_left_to_two_launches(rows: int, dtype: torch.dtype, fusion: str, kind: Any) -> None:
    inputs, weight, ops = given(rows, 64, dtype), randn(32, 64, dtype=dtype), opened(dtype, fusion)
    assert ops.gated_product_of_norm(inputs, weight, kind) is None
    assert kind != "silu" or ops.router_logits_of_norm(inputs, weight) is None
    assert ops.gated_product_of_norm(inputs, object(), "silu") is None
    wide = NormInputs(*(x.bfloat16() for x in inputs[:3]), 1e-5)
    assert ops.router_logits_of_norm(wide, weight.float()) is None  # it is not in the model's dtype


def test_the_sum_is_made_by_all_programs() -> None:
    """Blocks of columns are shared out, also where there are more programs than blocks."""
    for ins, outs in ((1100, 16), (64, 700)):
        inputs = given(3, ins, torch.float32)
        _, total, normed = norm_product(
            inputs, randn(outs, ins, dtype=torch.float32), HERE, torch.float32, keeps_norm=True
        )
        wanted, summed = unfused(inputs, torch.float32)
        assert torch.equal(total, summed)
        near(normed, wanted.double(), torch.float32, 1)


ROUTINGS = {
    "plain": (Routing(top_k=3, normalizes=True), 20),
    "groups": (Routing(top_k=8, num_groups=4, top_groups=2, group_score="two largest"), 64),
    "one expert for all": (Routing(top_k=1), 5),
}


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("tokens", [7, 20])
def test_a_routing_aligns_what_it_fills(case: str, tokens: int) -> None:
    """The routing's last program makes the lists that a launch behind it would make. It runs twice: the
    counter is 0 between launches."""
    routing, num_experts = ROUTINGS[case]
    logits = randn(tokens, num_experts, dtype=torch.float32)
    counter = route_counter(torch.device(TORCH_DEVICE), are_all_here=True, fusion="all")
    assert counter is not None
    plain, joined = CudaExperts(HERE, "all"), CudaExperts(HERE, "all", counter=counter)
    wanted, shares = plain.route(logits, None, routing)
    for _ in range(2):
        ids, weights = joined.route(logits, None, routing)
        assert torch.equal(ids, wanted) and torch.equal(weights, shares) and not counter.any()
        is_few = 16 < ids.numel() <= 64
        assert (joined.aligned is not None) == is_few
        if not is_few:
            continue
        tiles = joined._tiles(ids, num_experts)
        expected = moe_align_block_size(wanted, num_experts, tiles.size)
        used = int((expected.expert_ids >= 0).sum())
        assert torch.equal(tiles.expert_ids, expected.expert_ids)
        assert torch.equal(tiles.slots[: used * tiles.size], expected.slots[: used * tiles.size])
        assert joined.aligned is None


def test_whose_slots_are_aligned() -> None:
    """Those of the very ids that were routed; nowhere, where experts are on several ranks."""
    counter = route_counter(torch.device(TORCH_DEVICE), are_all_here=True, fusion="all")
    experts, logits = CudaExperts(HERE, "all", counter=counter), randn(6, 20, dtype=torch.float32)
    ids, _ = experts.route(logits, None, Routing(top_k=4))
    assert experts.aligned is not None
    aligned = experts.aligned[1]
    other = experts._tiles(ids.clone(), 20)
    assert other is not aligned and torch.equal(other.expert_ids, aligned.expert_ids)
    for are_all_here, fusion in ((False, "all"), (True, "safe")):
        given_fusion: Any = fusion
        device = torch.device(TORCH_DEVICE)
        assert route_counter(device, are_all_here=are_all_here, fusion=given_fusion) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_of_aligned_slots(dtype: torch.dtype) -> None:
    """Experts give the same sums, to the bit, from slots that the routing aligned as from a launch of its
    own."""
    counter = route_counter(torch.device(TORCH_DEVICE), are_all_here=True, fusion="all")
    x, logits = randn(8, 32, dtype=dtype), randn(8, 6, dtype=torch.float32)
    found = []
    for experts in (CudaExperts(HERE, "all"), CudaExperts(HERE, "all", counter=counter)):
        packed = experts.pack(randn(6, 2 * 48, 32, dtype=dtype), randn(6, 32, 48, dtype=dtype))
        found.append(experts.apply(x, *experts.route(logits, None, Routing(top_k=4)), packed))
    assert torch.equal(*found)

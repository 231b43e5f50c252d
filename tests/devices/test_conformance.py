"""Every device's arithmetic against naive formulas in fp64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.operands import Seen
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.fused_ops import UnfusedOps
from runtime.models.config.moe_config import Routing
from tests.devices.conformance import ON_DEVICES, Bench, bench, fused

__all__ = ["bench"]  # a fixture
pytestmark = ON_DEVICES


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize(
    ("shape", "weight_shape"), [((1, 8), (8,)), ((5, 33), (33,)), ((3, 4, 16), (16,)), ((3, 4, 16), (4, 16))]
)
def test_rms_norm(bench: Bench, shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> None:
    x, weight = bench.randn(*shape), bench.randn(*weight_shape)
    bench.near(bench.ops.rms_norm(x, weight, 1e-3), rms_norm(x, weight, 1e-3))
    bench.near(bench.ops.rms_norm(x * 0, weight, 1e-3), x.double() * 0)


def test_add_rms_norm(bench: Bench) -> None:
    x, residual, weight = bench.randn(5, 32), bench.randn(5, 32), bench.randn(32)
    total = (x + residual).double()
    normed, kept = bench.ops.add_rms_norm(x, residual.clone(), weight, 1e-6)
    bench.near(kept, total)
    bench.near(normed, rms_norm(total, weight, 1e-6))


def test_rotary(bench: Bench) -> None:
    x, angles = bench.randn(6, 3, 8), bench.randn(6, 4).double()
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    tables = bench.ops.rotary_tables(cos.float().to(bench.torch_device), sin.float().to(bench.torch_device))
    bench.near(bench.ops.rotary(x, *tables), torch.cat((pairs.real, pairs.imag), -1))


def test_act_and_mul(bench: Bench) -> None:
    x = bench.randn(5, 24)
    gate, up = x.double().chunk(2, dim=-1)
    bench.near(bench.ops.act_and_mul(x, "silu"), gate / (1 + (-gate).exp()) * up)

    bench.near(
        bench.ops.act_and_mul(x, "gelu_tanh"),
        0.5 * gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up,
    )


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(bench: Bench, rows: int, has_bias: bool) -> None:
    x, weight = bench.randn(rows, 48), bench.randn(40, 48) / 8
    bias = bench.randn(40) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    bench.near(bench.ops.linear(x, bench.ops.pack_linear(weight.clone()), bias), expected)


def test_store_kv(bench: Bench) -> None:
    """Only the named places change; keys may be a slice of a larger tensor."""
    caches = [bench.randn(256, 2, 8) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    fused, at = bench.randn(3, 4, 8), torch.tensor([7, 219, 0], device=bench.torch_device)
    bench.ops.store_kv(fused[:, :2], fused[:, 2:], *caches, at)
    for i, (cache, old) in enumerate(zip(caches, before, strict=True)):
        assert torch.equal(cache[at], fused[:, 2 * i : 2 * i + 2])
        others = [j for j in range(256) if j not in (7, 219, 0)]
        assert torch.equal(cache[others], old[others])


@pytest.mark.parametrize("has_norm", [False, True])
def test_prepare_heads(bench: Bench, has_norm: bool) -> None:
    """As its parts, of which each is tested here."""
    ops, qkv = bench.ops, bench.randn(3, 7 * 8)
    weight = bench.randn(2, 8).repeat_interleave(torch.tensor([3, 2], device=bench.torch_device), 0)
    norm = (weight, 1e-3) if has_norm else None  # the same for all queries, and for all keys
    angles, at = bench.randn(3, 4).float().cpu(), torch.tensor([7, 219, 0], device=bench.torch_device)
    tables = ops.rotary_tables(angles.cos().to(bench.torch_device), angles.sin().to(bench.torch_device))
    caches = [bench.randn(256, 2, 8) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    q = UnfusedOps(ops).prepare_heads(qkv, norm, *tables, *expected, at)
    bench.near(fused(ops).prepare_heads(qkv, norm, *tables, *caches, at), q.double())
    for cache, wanted in zip(caches, expected, strict=True):
        bench.near(cache, wanted.double())


def test_norms_for_routers(bench: Bench) -> None:
    """The sum's norm, and the same numbers in float32 where one launch gives both."""
    x, residual, weight = bench.randn(3, 64), bench.randn(3, 64), bench.randn(64)
    expected, total = bench.ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
    found = fused(bench.ops).add_rms_norm_wide(x, residual.clone(), weight, 1e-5)
    bench.near(found[0], expected.double())
    bench.near(found[2], total.double())
    if found[1] is not None:
        assert found[1].dtype == torch.float32 and torch.equal(found[1], found[0].float())


def test_penalise(bench: Bench) -> None:
    logits, seen = (
        torch.randn(3, 40, generator=bench.generator),
        Seen(
            torch.randint(0, 3, (4, 40), dtype=torch.int32, generator=bench.generator),
            torch.rand(4, 40, generator=bench.generator) < 0.3,
            torch.tensor([[0.5, 0.2, 1.3], [0.0, 0.0, 1.0], [1.0, 0.0, 0.7], [0.0, 2.0, 1.0]]),
        ),
    )
    wanted = logits.double()
    for row, at in ((2, 0), (0, 3)):
        frequency, presence, repetition = seen.penalties[at].double()
        for token, (known, count) in enumerate(
            zip(seen.in_prompt[at].tolist(), seen.generated[at].tolist(), strict=True)
        ):
            if known or count:
                wanted[row, token] *= repetition if wanted[row, token] < 0 else 1 / repetition
            wanted[row, token] -= count * frequency + (count > 0) * presence
    found, rows, at = (
        logits.to(bench.torch_device),
        torch.tensor([2, 0], device=bench.torch_device),
        torch.tensor([0, 3], device=bench.torch_device),
    )
    fused(bench.ops).penalise(
        found,
        rows,
        Seen(*(x.to(bench.torch_device) for x in (seen.generated, seen.in_prompt, seen.penalties))),
        at,
    )
    torch.testing.assert_close(found.double().cpu(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "routing",
    [
        Routing(top_k=3),
        Routing(top_k=2, normalizes=True, scale=2.5),
        Routing(top_k=8, score="sigmoid"),
        Routing(top_k=3, num_groups=4, top_groups=2),
        Routing(top_k=2, score="sigmoid", num_groups=2, group_score="two largest", scale=0.5),
        Routing(
            top_k=3, score="sigmoid", num_groups=4, top_groups=3, group_score="two largest", normalizes=True
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_route(bench: Bench, routing: Routing, has_bias: bool) -> None:
    logits = torch.randn(9, 8, generator=bench.generator).to(bench.torch_device)
    bias = torch.randn(8, generator=bench.generator).to(bench.torch_device) if has_bias else None
    ids, weights = bench.experts.route(logits, bias, routing)
    assert ids.dtype in (torch.int32, torch.int64) and weights.dtype == torch.float32
    for row, chosen, found in zip(logits.double().cpu(), ids.tolist(), weights.double().cpu(), strict=True):
        scores = (row.softmax(0) if routing.score == "softmax" else row.sigmoid()).tolist()
        choice = [score + (0.0 if bias is None else float(bias[i])) for i, score in enumerate(scores)]
        size, count = 8 // routing.num_groups, 1 if routing.group_score == "largest" else 2
        groups = sorted(
            range(routing.num_groups),
            reverse=True,
            key=lambda group: sum(sorted(choice[group * size : (group + 1) * size])[-count:]),
        )
        open_ids = [i for i in range(8) if i // size in groups[: routing.top_groups]]
        expected = sorted(open_ids, key=lambda i: -choice[i])[: routing.top_k]
        assert sorted(chosen) == sorted(expected)
        total = sum(scores[i] for i in expected) if routing.normalizes else 1.0
        torch.testing.assert_close(
            found,
            torch.tensor([scores[i] / total * routing.scale for i in chosen]).double(),
            atol=1e-5,
            rtol=1e-5,
        )


@pytest.mark.parametrize("first", [0, 3])
def test_moe(bench: Bench, first: int) -> None:
    """With `first` 3 the experts before and behind the five here are other ranks'. One expert gets no token,
    and one token has no expert here."""
    x, gate_up, down = bench.randn(7, 16), bench.randn(5, 48, 16) / 4, bench.randn(5, 16, 24) / 4
    ids = (
        torch.tensor([[0, 1], [4, 3], [3, 0], [1, 4], [8, 9], [6, 2], [3, 7]], device=bench.torch_device)
        % (5 if not first else 10)
        - first
    )
    weights = torch.rand(7, 2, generator=bench.generator).to(bench.torch_device)
    expected = torch.zeros(7, 16, dtype=torch.float64)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.double().cpu(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            if 0 <= expert < 5:
                gate, up = (gate_up[expert].double().cpu() @ x[token].double().cpu()).chunk(2)
                expected[token] += share * (down[expert].double().cpu() @ (gate / (1 + (-gate).exp()) * up))
    packed = bench.experts.pack(gate_up.clone(), down.clone())
    bench.near(bench.experts.apply(x, ids, weights, packed), expected)
    bench.near(bench.experts.apply(x[2:3], ids[2:3], weights[2:3], packed), expected[2:3])


@pytest.mark.parametrize("known", [{}, {"largest_k": 2, "has_top_p": True}], ids=str)
def test_sample(bench: Bench, known: dict[str, Any]) -> None:
    """A table of settings whose answer is certain; distributions are
    tests/layers/sampling/test_sampler.py's."""
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 5, device=bench.torch_device)
    draw = SamplingInputs(
        *(
            torch.tensor(column, dtype=kind, device=bench.torch_device)
            for column, kind in (
                ([0.0, 1.0, 1.0, 1.0, 1.0], torch.float32),
                ([1.0, 0.1, 1.0, 1.0, 1.0], torch.float32),
                ([0, 0, 1, 0, 2], torch.int64),
                ([0.0, 0.0, 0.0, 0.9, 0.0], torch.float32),
                ([0.9, 0.9, 0.9, 0.9, 0.9999], torch.float64),
            )
        ),
        **known,
    )
    assert bench.ops.sample(logits, draw).tolist() == [1, 1, 1, 1, 2]

"""Every device's arithmetic against naive formulas in fp64. A new device joins by a row in DEVICES."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.base import Experts, Ops, SamplingInputs
from runtime.devices.cpu.moe import CpuExperts
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.operands import FusedOps, Seen
from runtime.layers.fused_ops import UnfusedOps
from runtime.models.moe_config import Routing


def interpreted_ops(dtype: torch.dtype) -> Ops:
    """Triton's kernels on tensors of the cpu."""
    from runtime.devices.cuda.kernels.launch import INTERPRETER
    from runtime.devices.cuda.ops import CudaOps

    return CudaOps(dtype, INTERPRETER)


def cuda_ops(dtype: torch.dtype) -> Ops:
    from runtime.devices.cuda.kernels.launch import gpu_of
    from runtime.devices.cuda.ops import CudaOps

    return CudaOps(dtype, gpu_of(torch.device("cuda")))


def cuda_experts(ops: Any) -> Experts:
    from runtime.devices.cuda.moe import CudaExperts

    return CudaExperts(ops.gpu)


def ascend_ops(dtype: torch.dtype) -> Ops:
    from runtime.devices.ascend.device import import_npu, set_device
    from runtime.devices.ascend.options import AscendOptions

    import_npu()
    torch_device = set_device(AscendOptions(), 0)
    from runtime.devices.ascend.ops import AscendOps

    return AscendOps(dtype, 128, torch_device)


def ascend_experts(ops: Any) -> Experts:
    from runtime.devices.ascend.moe import AscendExperts

    return AscendExperts(ops.dtype)


DEVICES: dict[str, tuple[str, Callable[[torch.dtype], Ops], Callable[[Any], Experts]]] = {
    "cpu": ("cpu", CpuOps, CpuExperts),
    "npu": ("npu", ascend_ops, ascend_experts),
    "cuda": ("cuda", cuda_ops, cuda_experts),
    "interpreter": ("cpu", interpreted_ops, cuda_experts),
}
MARKS = {
    "npu": [pytest.mark.ascend],
    "cuda": [pytest.mark.cuda],
    # Triton compiles its kernels where there is a GPU, and interprets them elsewhere
    "interpreter": [pytest.mark.where(holds=lambda **_: not torch.cuda.is_available())],
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}

pytestmark = [
    pytest.mark.parametrize("device", [pytest.param(name, marks=MARKS.get(name, [])) for name in DEVICES]),
    pytest.mark.parametrize("dtype", TOLERANCE, ids=str),
    # the interpreter is slow, and float16 takes the same ways as bfloat16
    pytest.mark.where(holds=lambda device, dtype, **_: device != "interpreter" or dtype != torch.float16),
]


def fused(ops: Any) -> FusedOps:
    if type(ops).__name__ != "CudaOps":
        return UnfusedOps(ops)
    from runtime.devices.cuda.fused import CudaFusedOps

    return CudaFusedOps()


class Bench:
    """A device's ops, and tensors on it from fixed seeds."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.ops = DEVICES[device][1](dtype)
        self.torch_device = torch.device(DEVICES[device][0])
        self.experts = DEVICES[device][2](self.ops)
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(1)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(self.torch_device)

    def near(self, found: Tensor, expected: Tensor) -> None:
        assert found.dtype == self.dtype and found.shape == expected.shape
        torch.testing.assert_close(
            found.double().cpu(), expected.cpu(), atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype]
        )


@pytest.fixture
def bench(device: str, dtype: torch.dtype) -> Bench:
    return Bench(device, dtype)


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
    ops, qkv, weight = bench.ops, bench.randn(3, 7 * 8), bench.randn(5, 8)
    norm = (weight, 1e-3) if has_norm else None
    angles, at = bench.randn(3, 4).float().cpu(), torch.tensor([7, 219, 0], device=bench.torch_device)
    tables = ops.rotary_tables(angles.cos().to(bench.torch_device), angles.sin().to(bench.torch_device))
    caches = [bench.randn(256, 2, 8) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    q = UnfusedOps(ops).prepare_heads(qkv, norm, *tables, *expected, at)
    bench.near(fused(ops).prepare_heads(qkv, norm, *tables, *caches, at), q.double())
    for cache, wanted in zip(caches, expected, strict=True):
        bench.near(cache, wanted.double())


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


ROWS = {  # starts and counts; the first so many are decodes
    "one decode": (1, [(0, 1)]),
    "one long decode": (1, [(37, 1)]),
    "decodes of all lengths": (6, [(0, 1), (3, 1), (4, 1), (60, 1), (63, 1), (12, 1)]),
    "fresh extend": (0, [(0, 13)]),
    "extend after prefix": (0, [(21, 9)]),
    "extends of several tiles": (0, [(5, 300), (0, 200)]),
    "mixed": (3, [(9, 1), (50, 1), (1, 1), (0, 7), (33, 20), (8, 1)]),
}


SHAPES = {  # heads, key/value heads, page size, head size
    "cpu": [(4, 4, 4, 16), (6, 2, 16, 16), (4, 1, 1, 16)],
    "cuda": [(4, 4, 4, 16), (6, 2, 16, 16), (4, 1, 1, 16)],
    "interpreter": [(2, 2, 4, 16), (3, 1, 16, 16), (4, 1, 1, 16)],
    "npu": [(4, 4, 128, 16), (6, 2, 256, 128), (4, 1, 128, 128)],
}


@pytest.mark.sampled(30, by="device")
@pytest.mark.parametrize("window", [0, 1, 6, 130])
@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("shape", range(3))
def test_attention(bench: Bench, device: str, case: str, window: int, shape: int) -> None:
    """Pages in scrambled order; what no row may see is NaN, so that looking at it shows."""
    check_attention(bench, case, SHAPES[device][shape], Scores(SHAPES[device][shape][3] ** -0.5, window))


# an NPU refuses these models at start: its operator has neither caps nor sinks over pages
@pytest.mark.where(holds=lambda device, **_: device != "npu")
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("cap", "has_sinks"), [(2.0, False), (0.0, True), (2.0, True)])
def test_caps_and_sinks(bench: Bench, device: str, window: int, cap: float, has_sinks: bool) -> None:
    sinks = torch.linspace(-2, 2, SHAPES[device][1][0], device=bench.torch_device) if has_sinks else None
    check_attention(bench, "mixed", SHAPES[device][1], Scores(0.7, window, cap, sinks))


def check_attention(bench: Bench, case: str, shape: tuple[int, int, int, int], scores: Scores) -> None:
    num_decodes, rows = ROWS[case]
    heads, kv_heads, page_size, dim = shape
    num_pages = -(-1000 // page_size)
    order = np.random.default_rng(0).permutation(num_pages * len(rows)) + 1
    table = torch.from_numpy(order.reshape(len(rows), num_pages)).int().to(bench.torch_device)
    caches = [
        torch.full(
            ((len(order) + 1) * page_size, kv_heads, dim),
            math.nan,
            dtype=bench.dtype,
            device=bench.torch_device,
        )
        for _ in range(2)
    ]
    for cache in caches:
        cache[:page_size] = 0
    slots = np.random.default_rng(1).permutation(len(rows)).astype(np.int32)
    q = bench.randn(sum(count for _, count in rows), heads, dim)
    expected, at = [], 0
    for slot, (start, count) in zip(slots, rows, strict=True):
        k, v = bench.randn(start + count, kv_heads, dim), bench.randn(start + count, kv_heads, dim)
        positions = torch.arange(start + count)
        places = table[int(slot)].cpu().long()[positions // page_size] * page_size + positions % page_size
        caches[0][places], caches[1][places] = k, v
        expected.append(naive_attention(q[at : at + count], k, v, start, scores))
        at += count
    starts, counts = np.array(rows, np.int32).T
    plan = AttentionRows(num_decodes, slots, starts, counts)
    prepared = bench.ops.plan_attention(plan, table.unsqueeze(0), page_size, tuple({0, scores.window}))
    bench.near(bench.ops.attention(q, *caches, prepared, scores), torch.cat(expected))


def naive_attention(q: Tensor, k: Tensor, v: Tensor, start: int, scores: Scores) -> Tensor:
    window = scores.window
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    found = torch.einsum("qhd,khd->hqk", q.double(), k) * scores.scale
    found = scores.cap * (found / scores.cap).tanh() if scores.cap else found
    distance = (start + torch.arange(len(q))).unsqueeze(1) - torch.arange(len(k))
    hidden = (distance < 0) | (
        (distance >= window) if window else torch.zeros_like(distance, dtype=torch.bool)
    )
    found = found.masked_fill(hidden.to(q.device), -math.inf)
    if scores.sinks is not None:
        found = torch.cat((found, scores.sinks.double()[:, None, None].expand(-1, len(q), 1)), 2)
    return torch.einsum("hqk,khd->qhd", found.softmax(-1)[..., : len(k)], v)


LATENTS = {"npu": (4, 128)}  # heads and page size, where a device has limits


@pytest.mark.sampled(16, by="device")
@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize(
    ("rank", "nope_dim", "rope_dim", "value_dim"),
    [(16, 8, 4, 8), (8, 12, 4, 24), (64, 8, 8, 16), (64, 48, 16, 48)],
)
def test_latent_attention(
    bench: Bench, device: str, case: str, rank: int, nope_dim: int, rope_dim: int, value_dim: int
) -> None:
    """Latents that are always, sometimes and hardly ever worth expanding."""
    num_decodes, rows = ROWS[case]
    heads, page_size = LATENTS.get(device, (3, 8))
    num_pages = -(-1000 // page_size)
    order = np.random.default_rng(0).permutation(num_pages * len(rows)) + 1
    table = torch.from_numpy(order.reshape(len(rows), num_pages)).int().to(bench.torch_device)
    sizes = [((len(order) + 1) * page_size, 1, dim) for dim in (rank, rope_dim)]
    caches = [torch.full(size, math.nan, dtype=bench.dtype, device=bench.torch_device) for size in sizes]
    for cache in caches:
        cache[:page_size] = 0
    slots = np.random.default_rng(1).permutation(len(rows)).astype(np.int32)
    num_tokens, scale = sum(count for _, count in rows), 0.2
    q, q_rope = bench.randn(num_tokens, heads, nope_dim + rope_dim).split((nope_dim, rope_dim), dim=2)
    up = bench.randn(heads, nope_dim + value_dim, rank) / 4
    expected, at = [], 0
    for slot, (start, count) in zip(slots, rows, strict=True):
        latents, ropes = bench.randn(start + count, 1, rank), bench.randn(start + count, 1, rope_dim)
        positions = torch.arange(start + count)
        places = table[int(slot)].cpu().long()[positions // page_size] * page_size + positions % page_size
        caches[0][places], caches[1][places] = latents, ropes
        made = torch.einsum("tr,hdr->thd", latents.double().squeeze(1), up.double())
        keys = (
            torch.cat((made[..., :nope_dim], ropes.double().expand(-1, heads, -1)), 2)
            * scale
            * math.sqrt(nope_dim + rope_dim)
        )
        queries = torch.cat((q[at : at + count], q_rope[at : at + count]), 2)
        expected.append(
            naive_attention(queries, keys, made[..., nope_dim:], start, Scores(queries.shape[2] ** -0.5))
        )
        at += count
    starts, counts = np.array(rows, np.int32).T
    plan = AttentionRows(num_decodes, slots, starts, counts)
    packed = bench.ops.pack_latent(up, nope_dim)
    prepared = bench.ops.plan_attention(plan, table.unsqueeze(0), page_size, (0,))
    bench.near(bench.ops.latent_attention(q, q_rope, *caches, packed, prepared, scale), torch.cat(expected))


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
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
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
    """With `first` 3 the experts before and behind the five here are other ranks'; one is nobody's choice,
    one token has none here."""
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

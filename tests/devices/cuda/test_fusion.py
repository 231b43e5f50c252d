"""Kernels that do the work of several: the same numbers, to the bit where nothing is added up in another
order."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda import gemm as products
from runtime.devices.cuda.attention import attention, plan_attention, split_counters
from runtime.devices.cuda.fused import CudaFusedOps
from runtime.devices.cuda.gemm import quantize_activations
from runtime.devices.cuda.kernels.decode_work import list_work
from runtime.devices.cuda.kernels.latents import LatentNorms, prepare_latents
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.kernels.norm import rms_norm
from runtime.devices.cuda.kernels.rotary import rotary
from runtime.devices.cuda.kernels.store import store_kv
from runtime.devices.cuda.ops import CudaOps
from runtime.devices.cuda.weights import PackedWeight, pack
from runtime.devices.operands import SlotParams, SlotTensors
from runtime.layers.fused_ops import UnfusedOps
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt, Scheme
from tests.devices.cuda.test_attention import fill
from tests.devices.cuda.test_gemm import HERE, quantised, there
from tests.devices.cuda.torch_device import DTYPES, GPU, HAS_GPU, TORCH_DEVICE, near

SCHEMES = [Fp8(), Fp8(128), Int8()]
MANY = Gpu(132, 233472)  # of which few programs fill a part


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers, the same for each shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(TORCH_DEVICE)


def opened(dtype: torch.dtype, **options: Any) -> CudaFusedOps:
    return CudaFusedOps(CudaOps(dtype, HERE, **options))


def packed(scheme: Scheme, outs: int, ins: int) -> PackedWeight:
    return pack(there(quantised(scheme, outs, ins)))


def holds(ops: CudaOps, x: Tensor, weight: PackedWeight) -> bool:
    """Whether what was prepared for `x` is what the product would quantize; False: nothing was."""
    assert ops.prepared is not None
    found, expected = ops.prepared.take(x, weight), quantize_activations(x, weight)
    if found is None:
        return False
    assert expected.factors is not None and found.factors is not None and found.repeat == expected.repeat
    assert torch.equal(found.values, expected.values) and torch.equal(found.factors, expected.factors)
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=["fp8", "fp8 groups", "int8"])
def test_norms_and_gates_quantize_what_they_make(scheme: Scheme, dtype: torch.dtype) -> None:
    fused, weight = opened(dtype), packed(scheme, 48, 384)
    x, residual, norm = randn(3, 384, dtype=dtype), randn(4, 384, dtype=dtype)[1:], randn(384, dtype=dtype)
    expected, total = fused.ops.add_rms_norm(x, residual.clone(), norm, 1e-5)
    normed, kept = fused.add_rms_norm(x, residual, norm, 1e-5, weight)
    assert torch.equal(normed, expected) and torch.equal(kept, total) and holds(fused.ops, normed, weight)
    assert torch.equal(fused.ops.linear(normed, weight, None), fused.ops.linear(normed.clone(), weight, None))
    gate_up = randn(3, 768, dtype=dtype)
    for kind in ("silu", "gelu_tanh"):
        gated = fused.act_and_mul(gate_up, kind, weight)  # type: ignore[arg-type]
        assert torch.equal(gated, fused.ops.act_and_mul(gate_up, kind))  # type: ignore[arg-type]
        assert holds(fused.ops, gated, weight) and not holds(fused.ops, normed, weight)


def test_rows_of_several_blocks() -> None:
    """Groups of rows that no single program gates."""
    fused, weight = opened(torch.float32), packed(Fp8(128), 16, 2176)
    gated = fused.act_and_mul(randn(2, 2 * 2176), "silu", weight)
    assert holds(fused.ops, gated, weight)


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(lambda: packed(PackedInt(4, 128), 16, 384), id="activations in full"),
        pytest.param(lambda: packed(Fp8(96), 16, 384), id="groups of no power of two"),
        pytest.param(lambda: packed(Fp8(128), 16, 320), id="a group that is not full"),
        pytest.param(lambda: randn(16, 384), id="weights in full"),
        pytest.param(lambda: None, id="nothing is fed"),
    ],
)
def test_what_no_kernel_prepares(weight: Any) -> None:
    fused, feeds = opened(torch.float32), weight()
    size = feeds.ins if isinstance(feeds, PackedWeight) else 384
    x, norm = randn(2, size), randn(size)
    normed, _ = fused.add_rms_norm(x, x.clone(), norm, 1e-5, feeds)
    gated = fused.act_and_mul(randn(2, 2 * size), "silu", feeds)
    assert fused.ops.prepared is not None and fused.ops.prepared.latest is None
    assert torch.equal(normed, fused.ops.add_rms_norm(x, x.clone(), norm, 1e-5)[0]) and gated.shape == x.shape


def test_without_fusion_nothing_is_prepared() -> None:
    fused, weight = opened(torch.float32, fusion="off"), packed(Fp8(), 16, 384)
    x = randn(2, 384)
    fused.add_rms_norm(x, x.clone(), randn(384), 1e-5, weight)
    assert fused.ops.prepared is None


@pytest.mark.parametrize("pools", [1, 2])
def test_the_beginning_of_a_decode_step(pools: int) -> None:
    generator, num, page = torch.Generator().manual_seed(pools), 37, 4
    tables = torch.randint(0, 90, (pools, 50, 8), generator=generator, dtype=torch.int32)
    lengths, last = torch.randint(0, 32, (50,), generator=generator), torch.arange(50) + 1000
    rows = torch.randperm(49, generator=generator)[:num].int()
    updates = [torch.stack((rows, (lengths[rows] // page).int(), rows + 100 + i)) for i in range(pools)]
    given = torch.cat((rows.unsqueeze(0), *updates)).to(TORCH_DEVICE)
    fused, found = opened(torch.float32), []
    for ops in (fused, UnfusedOps(fused.ops)):
        state = SlotTensors(*(x.clone().to(TORCH_DEVICE) for x in (tables, lengths, last)))
        found.append((ops.begin_decodes(given, state, page), state))
    (begun, state), (expected, known) = found
    assert torch.equal(state.page_tables, known.page_tables) and not torch.equal(
        known.page_tables.cpu(), tables
    )
    for one, other in zip(begun[:3], expected[:3], strict=True):
        assert torch.equal(one, other) and one.dtype == torch.int64
    for one, other in zip(begun.locations, expected.locations, strict=True):
        assert torch.equal(one, other)
    plan: Any = begun.attention
    assert expected.attention is None and plan.page_tables is state.page_tables and plan.page_size == page
    (launch,) = plan.launches
    ones = torch.ones(num, dtype=torch.int64, device=TORCH_DEVICE)
    wanted = torch.stack((expected.slots, expected.positions, ones, torch.arange(num, device=TORCH_DEVICE)))
    assert torch.equal(launch.rows, wanted.int()) and launch.max_kv_len == 32 and launch.num_queries == num


def test_what_sampling_needs() -> None:
    """Random numbers are those of the definition, to the bit."""
    generator, vocab = torch.Generator().manual_seed(3), 77
    floats, slots = (
        torch.rand(3, 200, generator=generator),
        torch.randint(0, 200, (150,), generator=generator),
    )
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (200,), generator=generator)
    top_k = torch.randint(0, 100, (200,), generator=generator)
    params = SlotParams(*(x.to(TORCH_DEVICE) for x in (floats, seeds, top_k)), vocab)
    at = slots.to(TORCH_DEVICE), torch.arange(150, device=TORCH_DEVICE) * 1_000_003
    fused = opened(torch.float32)
    found, expected = (ops.sampling_inputs(*at, params, (9, True)) for ops in (fused, UnfusedOps(fused.ops)))
    for name in ("temperature", "top_p", "min_p", "uniform"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert (found.largest_k, found.has_top_p) == (9, True) and found.settings is not None
    bounds = torch.where(expected.top_k > 0, expected.top_k, vocab).clamp_max(vocab).int()
    assert found.bounds is not None and torch.equal(found.bounds, bounds)
    few = [
        ops.sampling_inputs(at[0][:4], at[1][:4], params, (9, True)) for ops in (fused, UnfusedOps(fused.ops))
    ]
    tokens = [fused.ops.sample(randn(4, vocab), inputs) for inputs in few]
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    ("num_decodes", "scores"),
    [(2, Scores(0.2)), (2, Scores(0.2, sinks=torch.arange(8.0) / 4)), (0, Scores(0.2))],
    ids=["decodes", "sinks", "a prompt"],
)
def test_the_last_program_merges(num_decodes: int, scores: Scores) -> None:
    """Twice: counters are zeros between launches."""
    rows = [(600, 1), (350, 1)] if num_decodes else [(560, 3)]
    cache = fill(rows, 2, (32, 32), 16, torch.float32, torch.float32)
    slots, starts, counts = (np.array(x, np.int32) for x in (range(len(rows)), *zip(*rows, strict=True)))
    if scores.sinks is not None:
        scores = Scores(0.2, sinks=scores.sinks.to(TORCH_DEVICE))
    plan = plan_attention(AttentionRows(num_decodes, slots, starts, counts), cache.table, 16)
    q, counters = randn(int(counts.sum()), 8, 32), split_counters(GPU, TORCH_DEVICE)
    expected = attention(q, cache.keys, cache.values, plan, scores, GPU)
    for _ in range(2):
        found = attention(q, cache.keys, cache.values, plan, scores, GPU, counters)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert not counters.any()


@pytest.mark.parametrize("window", [0, 100])
def test_work_is_listed(window: int) -> None:
    """Every part of every row once, none of more tiles than what the rows leave to each program; the rest are
    parts without keys."""
    lengths, tile, wanted = [1, 3000, 64, 65, 700], 16, 12
    rows = torch.zeros(4, 5, dtype=torch.int32)
    rows[1] = torch.tensor(lengths) - 1
    work = list_work(rows.to(TORCH_DEVICE), wanted, window, tile).T.tolist()
    tiles = [-(-length // tile) - max(0, length - window) // tile * bool(window) for length in lengths]
    size = max(4, -(-sum(tiles) // wanted))
    parts = [max(1, -(-count // size)) for count in tiles]
    expected = [[row, part, count] for row, count in enumerate(parts) for part in range(count)]
    assert len(expected) <= len(work) == wanted + 5
    assert work == expected + [[0, 1, 1]] * (len(work) - len(expected))


@pytest.mark.parametrize(
    "scores",
    [
        pytest.param(Scores(0.2), id="plain", marks=pytest.mark.full),
        pytest.param(Scores(0.2, window=90), id="window", marks=pytest.mark.full),
        pytest.param(Scores(0.2, sinks=torch.arange(8.0) / 4), id="sinks"),
    ],
)
def test_listed_decodes(scores: Scores) -> None:
    """One long row and short ones, as without a list; twice: counters are zeros between launches."""
    rows = [(1400, 1), (0, 1), (33, 1), (350, 1)]
    cache = fill(rows, 2, (32, 32), 16, torch.float32, torch.float32)
    if scores.sinks is not None:
        scores = Scores(0.2, sinks=scores.sinks.to(TORCH_DEVICE))
    starts, counts = np.array(rows, np.int32).T
    slots = np.arange(4, dtype=np.int32)
    q, counters = randn(4, 8, 32), split_counters(GPU, TORCH_DEVICE, lists=True)
    plan = plan_attention(AttentionRows(4, slots, starts, counts), cache.table, 16)
    expected = attention(q, cache.keys, cache.values, plan, scores, GPU)
    for _ in range(2):
        found = attention(q, cache.keys, cache.values, plan, scores, GPU, counters, lists=True)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert not counters.any()
    ((num_parts, window, _),) = plan.launches[0].work
    assert (num_parts, window) == (GPU.num_cores * 3 // 2, scores.window)


@pytest.mark.parametrize("scheme", [*SCHEMES, PackedInt(4, 128)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_the_last_program_adds_partial_sums(scheme: Scheme, has_bias: bool) -> None:
    """Twice: counters are zeros between launches."""
    weight, x, counters = (
        packed(scheme, 72, 1024),
        randn(3, 1024),
        products.split_counters(MANY, TORCH_DEVICE),
    )
    bias = randn(72) if has_bias else None
    expected = products.gemm(x, weight, MANY, bias)
    for _ in range(2):
        assert torch.equal(products.gemm(x, weight, MANY, bias, counters=counters), expected)
        assert not counters.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_with_its_gate(dtype: torch.dtype) -> None:
    fused, weight = opened(dtype, fusion="all"), randn(2 * 200, 96, dtype=dtype).div(10)
    for rows in (1, 2, 16):  # one is for the kernel of few rows
        x = randn(rows, 96, dtype=dtype)
        found = fused.gated_product(x, weight, "silu")
        assert found is not None
        gate, up = (x.double() @ weight.double().T).chunk(2, 1)
        near(found, torch.nn.functional.silu(gate) * up, dtype, 2)
    assert fused.gated_product(randn(17, 96, dtype=dtype), weight, "silu") is None
    assert fused.gated_product(randn(1, 96, dtype=dtype), weight, "gelu_tanh") is None
    assert opened(dtype).gated_product(randn(2, 96, dtype=dtype), weight, "silu") is None


def test_routers_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has this product on GPUs alone: here a double computes it as its document says."""
    x, weight = randn(3, 64, dtype=torch.bfloat16), randn(8, 64, dtype=torch.bfloat16)
    plain, fused = opened(torch.bfloat16), opened(torch.bfloat16, fusion="all")
    expected = plain.router_logits(x, plain.pack_router(weight))
    assert expected.dtype == torch.float32 and fused.pack_router(weight) is weight
    if not HAS_GPU:
        asked = []

        def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
            asked.append((a.dtype, b.shape, out_dtype))
            return a.to(out_dtype) @ b.to(out_dtype)

        monkeypatch.setattr(torch, "mm", mm)
    found = fused.router_logits(x, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert HAS_GPU or asked == [(torch.bfloat16, (64, 8), torch.float32)]


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("has_query_latents", [True, False])
def test_latents(has_query_latents: bool, kv_dtype: torch.dtype) -> None:
    """Against norm, rotation and store one by one; without query latents into one row for each token."""
    rank, rope, num, dtype = 96, 32, 5, torch.bfloat16
    x = randn(num + 1, 80 + rank + rope, dtype=dtype)[1:]
    norm_q, norm_k = randn(80, dtype=dtype), randn(rank, dtype=dtype)
    cos, sin = randn(num, rope // 2), randn(num, rope // 2 + 1)[:, 1:].contiguous()
    at = torch.tensor([7, 2, 0, 11, 5], device=TORCH_DEVICE)
    caches, expected = (
        tuple(torch.zeros(12, 1, dim, dtype=dtype, device=TORCH_DEVICE).to(kv_dtype) for dim in (rank, rope))
        for _ in range(2)
    )
    if not has_query_latents:
        whole = torch.zeros(12, 1, rank + rope, dtype=dtype, device=TORCH_DEVICE).to(kv_dtype)
        caches = whole.split((rank, rope), 2)
    q, latents, ropes = x.split((80, rank, rope), 1)
    store_kv(
        rms_norm(latents, norm_k, 1e-6).unsqueeze(1), rotary(ropes.unsqueeze(1), cos, sin), *expected, at
    )
    norms = LatentNorms(norm_q if has_query_latents else None, 1e-5, norm_k, 1e-6)
    found = prepare_latents(x, norms, cos, sin, caches, at)
    for cache, known in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), known.view(torch.uint8))
    assert (found is None) is not has_query_latents
    if found is not None:
        assert torch.equal(found, rms_norm(q, norm_q, 1e-5))

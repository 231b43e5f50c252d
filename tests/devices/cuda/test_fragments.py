"""Weights of four bits in fragments: their order, and products with them."""

import pytest
import torch
from torch import Tensor

from runtime.devices.cpu.moe import CpuExperts
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.cpu.quantized import multiply
from runtime.devices.cuda import gemm as gemms
from runtime.devices.cuda import moe as layer
from runtime.devices.cuda.fragments import MOST_EXPONENT, scale_words, to_words
from runtime.devices.cuda.gemm import gemm
from runtime.devices.cuda.gemm_tiles import TileBytes, select_tile
from runtime.devices.cuda.kernels.launch import INTERPRETER, Gpu, gpu_of
from runtime.devices.cuda.moe import CudaExperts
from runtime.devices.cuda.weights import PackedWeight, pack
from runtime.devices.operands import ClampedExperts
from runtime.layers.quantization.mxfp4 import dequantized
from runtime.models.config.quantization_schemes import PackedInt
from runtime.models.gpt_oss import clamped
from tests.devices.cuda.test_gemm import quantised, randn, there
from tests.devices.cuda.torch_device import DTYPES, HAS_GPU, TORCH_DEVICE, near

HERE = gpu_of(TORCH_DEVICE) if HAS_GPU else INTERPRETER
INT4 = frozenset({"int4_weight"})
CASES = [
    (PackedInt(4, 128), 40, 256),
    (PackedInt(4, 128, has_zero_points=True), 40, 384),
    (PackedInt(4, 0), 24, 200),
    (PackedInt(4, 32, has_zero_points=True), 24, 160),
    (PackedInt(4, 64), 72, 320),
    (PackedInt(4, 256), 24, 512),
    (PackedInt(4, 128, has_g_idx=True), 24, 256),
]


def test_a_thread_finds_its_numbers_in_a_row() -> None:
    """Words 0 to 3 of an output have inputs 0, 1, 8, 9 .. 25 of each part, which the first of four threads
    holds in products of the tensor cores."""
    codes = (torch.arange(128) % 32 // 2).to(torch.uint8)
    words = to_words(codes.view(1, -1), "fragments4")[0, :4].tolist()
    assert [word & 0xFFFFFFFF for word in words] == [0x00000000, 0x44444444, 0x88888888, 0xCCCCCCCC]
    parts = to_words((torch.arange(128) // 32 + 1).to(torch.uint8).view(1, -1), "fragments4")
    assert set(parts.flatten().tolist()) == {0x43214321}


def test_scales_of_16_bits_are_kept() -> None:
    scales = torch.cat([randn(1, 1, 300).half().float(), randn(1, 1, 300).bfloat16().float()], 1)
    zeros = torch.randint(0, 17, scales.shape).to(torch.uint8)
    words = scale_words(scales, zeros)
    assert torch.equal(words & 31, zeros.int()) and torch.equal((words & ~31).view(torch.float32), scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scheme", "outs", "ins"), CASES, ids=str)
def test_products(scheme: PackedInt, outs: int, ins: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(19, ins).to(dtype), quantised(scheme, outs, ins), randn(outs)
    packed = pack(there(weight), INT4)
    assert packed.kind == "fragments4" and pack(there(weight), frozenset()).kind == "codes4"
    wanted = multiply(x.float(), weight, bias)
    found = gemm(x.to(TORCH_DEVICE), packed, HERE, bias.to(dtype).to(TORCH_DEVICE))
    near(found / wanted.abs().amax(), wanted / wanted.abs().amax(), dtype, 2)


def test_splits_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a launch of their own, and by the last program."""
    x, bias = randn(3, 640).to(TORCH_DEVICE), randn(48).to(TORCH_DEVICE)
    packed = pack(there(quantised(PackedInt(4, 64), 48, 640)), INT4)
    whole, counters = gemm(x, packed, HERE, bias), torch.zeros(8, dtype=torch.int32, device=TORCH_DEVICE)
    monkeypatch.setattr(gemms, "select_splits", lambda *_: 3)
    most = whole.abs().amax().item()
    near(gemm(x, packed, HERE, bias), whole, torch.float32, most)
    near(gemm(x, packed, HERE, bias, counters=counters), whole, torch.float32, most)


@pytest.mark.parametrize(
    "scheme", [PackedInt(4, 48), PackedInt(8, 128), PackedInt(4, 64, activations="token")], ids=str
)
def test_what_fragments_lack_is_packed_otherwise(scheme: PackedInt) -> None:
    assert pack(there(quantised(scheme, 24, 192)), frozenset({scheme.name})).kind.startswith("codes")


def coded_stack(outs: int, ins: int, most: int = 130) -> tuple[Tensor, Tensor]:
    """Random experts in MXFP4: all codes, with exponents below `most`."""
    generator = torch.Generator().manual_seed(outs + ins)
    codes = torch.randint(0, 256, (5, outs, ins // 2), generator=generator).to(torch.uint8)
    return codes, torch.randint(most - 8, most, (5, outs, ins // 32), generator=generator).to(torch.uint8)


def one_by_one(
    x: Tensor, ids: Tensor, shares: Tensor, stacks: list[Tensor], biases: tuple[Tensor, Tensor]
) -> Tensor:
    """What models/gpt_oss.py computes where the device does not compute experts together."""
    out = torch.zeros_like(x)
    for token, line in enumerate(ids.tolist()):
        for slot, expert in enumerate(line):
            if 0 <= expert < 5:
                first = (stacks[0][expert] @ x[token] + biases[0][expert]).view(2, -1)
                inner = clamped(first.t().reshape(1, -1))[0]
                out[token] += (stacks[1][expert] @ inner + biases[1][expert]) * shares[token, slot]
    return out


CLAMPED = [
    ("mxfp4", torch.float32, 0),
    ("mxfp4", torch.float32, 1000),
    ("plain", torch.float32, 0),
    ("large", torch.float32, 1000),
    *(("mxfp4", dtype, size) for dtype in DTYPES[1:] for size in (0, 1000)),
]


@pytest.mark.parametrize(("kind", "dtype", "single"), CLAMPED, ids=str)
def test_clamped_experts(kind: str, dtype: torch.dtype, single: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of gpt-oss, in MXFP4 and in full, also with scales that only plain numbers have; slots in
    tiles, or one by one."""
    monkeypatch.setattr(layer, "SINGLE_SLOTS", single)
    experts, most = CudaExperts(HERE), MOST_EXPONENT + 2 if kind == "large" else 122
    assert isinstance(experts, ClampedExperts) and experts.packs_mxfp4
    stacks = [coded_stack(2 * 64, 96, most), coded_stack(96, 64, most)]
    numbers = [dequantized(codes.unflatten(2, (-1, 16)), scales) for codes, scales in stacks]
    biases, ids = (randn(5, 128), randn(5, 96)), torch.tensor([[0, 3], [3, 2], [4, -1], [7, 3], [1, 1]])
    x, shares = randn(5, 96) * 2.0 ** (122 - most), torch.rand(ids.shape)
    there_stacks = [tuple(part.to(TORCH_DEVICE) for part in stack) for stack in stacks]
    there_biases = tuple(bias.to(dtype).to(TORCH_DEVICE) for bias in biases)
    if kind == "plain":
        packed = experts.pack_clamped(*(n.to(dtype).to(TORCH_DEVICE) for n in numbers), there_biases)
    else:
        packed = experts.pack_clamped_mxfp4(*there_stacks, there_biases)
    assert [one.kind for one in packed] == ["mxfp4" if kind == "mxfp4" else "plain"] * 2
    found = experts.apply(*(tensor.to(TORCH_DEVICE) for tensor in (x.to(dtype), ids, shares.float())), packed)
    rounded = tuple(bias.to(dtype).float() for bias in biases)
    wanted = one_by_one(x.to(dtype).float(), ids, shares, numbers, rounded)
    near(found / wanted.abs().amax(), wanted / wanted.abs().amax(), dtype, 1)


@pytest.mark.parametrize("scheme", [PackedInt(4, 32), PackedInt(4, 128, has_zero_points=True)], ids=str)
def test_gated_experts(scheme: PackedInt) -> None:
    def stacked(outs: int, ins: int) -> PackedWeight:
        return pack(there(quantised(scheme, outs, ins)), INT4)

    weights = quantised(scheme, 2 * 128, 128), quantised(scheme, 128, 128)
    oracle = CpuExperts(CpuOps(torch.float32))
    pairs = [(oracle.ops.pack_quantized(weights[0]), oracle.ops.pack_quantized(weights[1]))]
    ids, x = torch.tensor([[0], [0], [-1], [0]]), randn(4, 128)
    shares = torch.rand(ids.shape)
    wanted = oracle.apply(x, ids, shares, pairs)
    packed = stacked(2 * 128, 128), stacked(128, 128)
    found = CudaExperts(HERE).apply(*(t.to(TORCH_DEVICE) for t in (x, ids, shares)), packed)
    near(found / wanted.abs().amax(), wanted / wanted.abs().amax(), torch.float32, 2)


@pytest.mark.parametrize("gpu", [Gpu(108, 167936), Gpu(128, 102400, True), Gpu(132, 233472, True)], ids=str)
def test_tiles_fit(gpu: Gpu) -> None:
    for rows in (1, 16, 32, 64, 128, 4096):
        for is_gated in (False, True):
            facts = TileBytes(2, 0.5, 128, True, is_gated, False, True, True)
            tile = select_tile(rows, 1536, facts, gpu)
            stage = tile.k * (tile.m * 2 + tile.n * (1 + is_gated) / 2)
            assert (tile.stages - 1) * stage < gpu.shared_bytes - 1024 and tile.stages >= 2 and tile.k == 128

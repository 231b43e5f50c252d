"""Products with weights in few bits, against the cpu device: shapes and types that the suite of schemes
lacks, and each way there is."""

import pytest
import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cpu.quantized import multiply
from runtime.devices.cuda import gemm as gemms
from runtime.devices.cuda.gemm import gemm, linear, supports_torch_gemm, torch_gemm
from runtime.devices.cuda.gemm_tiles import TileBytes, select_splits, select_tile
from runtime.devices.cuda.kernels.launch import INTERPRETER, Gpu, gpu_of
from runtime.devices.cuda.weights import align_groups, interleave, pack
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt, Scheme
from tests.devices.cuda.torch_device import DTYPES, GPU, HAS_GPU, TORCH_DEVICE, near

HERE = gpu_of(TORCH_DEVICE) if HAS_GPU else INTERPRETER


def randn(*shape: int) -> Tensor:
    """Random numbers, the same for each shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def quantised(scheme: Scheme, outs: int, ins: int) -> Quantized:
    """A random quantized weight."""
    generator = torch.Generator().manual_seed(outs + ins)
    group = 0 if isinstance(scheme, Int8) else scheme.group_size
    groups = -(-ins // group) if group else 1
    scale = torch.rand(outs, groups, generator=generator) / 100 + 1e-3
    if isinstance(scheme, PackedInt):
        weight = torch.randint(0, 256, (outs, ins * scheme.bits // 8), generator=generator).to(torch.uint8)
        zeros = (
            torch.randint(1, 2**scheme.bits, (outs, groups), generator=generator).to(torch.uint8)
            if scheme.has_zero_points
            else None
        )
        order = (torch.randperm(ins, generator=generator) // group).int() if scheme.has_g_idx else None
        return Quantized(scheme, weight, scale * 16 / 2**scheme.bits, zeros, order)
    if isinstance(scheme, Int8):
        return Quantized(
            scheme, torch.randint(-128, 128, (outs, ins), generator=generator).to(torch.int8), scale
        )
    return Quantized(scheme, (torch.randn(outs, ins, generator=generator) * 9).to(torch.float8_e4m3fn), scale)


def there(weight: Quantized) -> Quantized:
    """The weight on the device of the tests."""
    names = ("weight", "scale", "zeros", "order")
    return Quantized(
        weight.scheme,
        **{name: t.to(TORCH_DEVICE) for name in names if (t := getattr(weight, name)) is not None},
    )


CASES = [
    (Fp8(), 72, 200),
    (Fp8(128), 40, 320),
    (Fp8(128, activations="none"), 40, 256),
    (Int8(), 72, 200),
    (PackedInt(4, 128, has_zero_points=True), 40, 256),
    (PackedInt(4, 0), 24, 120),
    (PackedInt(4, 128, has_g_idx=True), 24, 256),
    (PackedInt(4, 64, activations="token"), 24, 192),
    (PackedInt(8, 128), 40, 256),
]
SPLIT = [(Fp8(), 48, 640), (Fp8(64), 48, 640), (Int8(), 48, 640), (PackedInt(4, 64), 48, 640)]
TILED = [
    TileBytes(2, 2, 128, False, True, False),
    TileBytes(1, 1, 128, False, True, False),
    TileBytes(2, 0.5, 64, True, False, False),
    TileBytes(2, 1, 128, False, True, False),
    TileBytes(4, 4, 128, False, True, True),
    TileBytes(2, 1, 32, False, False, False),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scheme", "outs", "ins"), CASES, ids=str)
def test_odd_shapes(scheme: Scheme, outs: int, ins: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(19, ins).to(dtype), quantised(scheme, outs, ins), randn(outs)
    wanted = multiply(x.float(), weight, bias)
    found = gemm(x.to(TORCH_DEVICE), pack(there(weight)), HERE, bias.to(dtype).to(TORCH_DEVICE))
    near(found / wanted.abs().amax(), wanted / wanted.abs().amax(), dtype, 2)


@pytest.mark.parametrize(("scheme", "outs", "ins"), SPLIT, ids=str)
def test_splits_are_added(scheme: Scheme, outs: int, ins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some of them have nothing left to add."""
    x, packed, bias = (
        randn(3, ins).to(TORCH_DEVICE),
        pack(there(quantised(scheme, outs, ins))),
        randn(outs).to(TORCH_DEVICE),
    )
    whole = gemm(x, packed, HERE, bias)
    monkeypatch.setattr(gemms, "select_splits", lambda *_: 4)
    near(gemm(x, packed, HERE, bias), whole, torch.float32, whole.abs().amax().item())


def test_a_view_of_rows() -> None:
    packed, whole = pack(there(quantised(PackedInt(8, 32), 24, 64))), randn(6, 160).to(TORCH_DEVICE)
    part = whole[::2, 32:96]
    assert torch.equal(gemm(part, packed, HERE), gemm(part.contiguous(), packed, HERE))
    assert gemm(part[:0], packed, HERE).shape == (0, 24)


@pytest.mark.parametrize("scheme", [Fp8(), Int8()], ids=str)
def test_torch_multiplies_alike(scheme: Scheme) -> None:
    if HAS_GPU and isinstance(scheme, Fp8) and not HERE.has_fp8:
        pytest.skip("this GPU has no products of 8-bit floats")
    x, weight, bias = (
        randn(33, 64).bfloat16().to(TORCH_DEVICE),
        there(quantised(scheme, 48, 64)),
        randn(48).bfloat16().to(TORCH_DEVICE),
    )
    packed = pack(weight)
    assert supports_torch_gemm(packed, 33, torch.bfloat16, GPU if HAS_GPU else Gpu(1, 1, True))
    near(torch_gemm(x, packed, bias), gemm(x, packed, HERE, bias), torch.bfloat16, 4)


@pytest.mark.parametrize(
    ("rows", "backend", "is_torchs"),
    [(1, "by_rows", False), (64, "by_rows", True), (1, "cutlass", True), (64, "triton", False)],
)
def test_whose_product_it_is(
    rows: int, backend: str, is_torchs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, new, taken = pack(there(quantised(Fp8(), 48, 64))), Gpu(132, 233472, True), []
    monkeypatch.setattr(gemms, "torch_gemm", lambda *_: taken.append("torch"))
    monkeypatch.setattr(gemms, "gemm", lambda *_: taken.append("triton"))
    linear(torch.zeros(rows, 64, dtype=torch.bfloat16, device=TORCH_DEVICE), packed, None, new, backend)
    linear(
        torch.zeros(rows, 64, dtype=torch.bfloat16, device=TORCH_DEVICE),
        packed,
        None,
        Gpu(108, 167936),
        backend,
    )
    assert taken == ["torch" if is_torchs else "triton", "triton"]


def test_what_torch_lacks_is_ours() -> None:
    new = Gpu(132, 233472, True)
    # scales of groups
    assert not supports_torch_gemm(pack(there(quantised(Fp8(64), 48, 128))), 64, torch.bfloat16, new)
    assert not supports_torch_gemm(
        pack(there(quantised(Fp8(), 40, 64))), 64, torch.bfloat16, new
    )  # 40 outputs
    assert not supports_torch_gemm(
        pack(there(quantised(Int8(), 48, 64))), 16, torch.bfloat16, new
    )  # few rows
    assert not supports_torch_gemm(pack(there(quantised(Fp8(), 48, 64))), 64, torch.float16, new)


def test_groups_of_uneven_size_are_filled_up() -> None:
    columns, width = align_groups(torch.tensor([[1, 0, 1, 1, 0]]), 3, 4)
    assert (columns.tolist(), width) == ([[1, 4, -1, -1, 0, 2, 3, -1, -1, -1, -1, -1]], 4)


def test_halves_meet_what_lies_side_by_side() -> None:
    assert interleave(torch.arange(8, dtype=torch.uint8).view(1, 8), 2).tolist() == [
        [0 + 16 * 2, 1 + 16 * 3, 4 + 16 * 6, 5 + 16 * 7]
    ]


@pytest.mark.parametrize("gpu", [Gpu(108, 167936), Gpu(128, 102400, True), Gpu(132, 233472, True)], ids=str)
def test_tiles_fit(gpu: Gpu) -> None:
    for rows in (1, 16, 32, 64, 128, 4096):
        for tile_bytes in TILED:
            tile = select_tile(rows, 1536, tile_bytes, gpu)
            stage = tile.k * (
                tile.m * tile_bytes.input_bytes + tile.n * (1 + tile_bytes.is_gated) * tile_bytes.weight_bytes
            )
            assert (tile.stages - 1) * stage < gpu.shared_bytes - 1024 and tile.stages >= 2
            assert tile.k == tile_bytes.k_block if tile_bytes.is_fixed else tile.k <= tile_bytes.k_block


def test_splits_fill_the_card() -> None:
    gpu = Gpu(132, 233472)
    assert (
        select_splits(96, 1, 32, gpu) == 2
        and select_splits(16, 1, 64, gpu) == 16
        and select_splits(16, 4096, 64, gpu) == 1
    )
    assert select_splits(200, 1, 64, gpu) == 1 and select_splits(4, 1, 3, gpu) == 1

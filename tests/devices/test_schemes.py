"""Every device's products with weights in few bits, against the definition of each scheme in devices/base.py,
spelled out in fp64."""

import pytest
import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.models.config.quantization_schemes import SCHEMES, Fp8, Int8, PackedInt, Scheme
from runtime.options.facts import DEVICES as FACTS
from tests.devices.conformance import DEVICES, MARKS, TOLERANCE, Bench

pytestmark = [
    pytest.mark.parametrize("device", [pytest.param(name, marks=MARKS.get(name, [])) for name in DEVICES]),
    pytest.mark.parametrize("dtype", TOLERANCE, ids=str),
    pytest.mark.where(holds=lambda **case: multiplies(**case)),
]

CASES: list[Scheme] = [
    Fp8(),
    Fp8(activations="tensor"),
    Fp8(activations="none"),
    Fp8(group_size=16),
    Fp8(group_size=16, activations="none"),
    Fp8(group_size=32, activations="none"),
    Int8(),
    Int8("tensor"),
    PackedInt(4, 16),
    PackedInt(4, 16, has_zero_points=True),
    PackedInt(4, 0),
    PackedInt(4, 16, has_zero_points=True, has_g_idx=True),
    PackedInt(8, 32),
    PackedInt(8, 16, has_zero_points=True, has_g_idx=True),
    PackedInt(4, 0, activations="token"),
    PackedInt(4, 16, activations="token"),
    PackedInt(4, 32),
    PackedInt(4, 32, has_zero_points=True),
    PackedInt(8, 32, has_zero_points=True),
    PackedInt(8, 0),
    PackedInt(4, 32, activations="token"),
]
SAME = {"interpreter": "cuda"}
SCHEME = pytest.mark.parametrize("scheme", CASES, ids=str)


def refuses(device: str, scheme: Scheme) -> bool:
    """Shapes that a device's kernels lack, though it has the scheme: it says so while it loads them
    (tests/ascend/test_quantised.py)."""
    return (
        device == "npu" and isinstance(scheme, PackedInt) and (scheme.group_size % 32 > 0 or scheme.has_g_idx)
    )


@pytest.fixture
def bench(device: str, dtype: torch.dtype) -> Bench:
    return Bench(device, dtype)


def multiplies(device: str, dtype: torch.dtype, scheme: Scheme | None = None, **_: object) -> bool:
    """Whether the device takes such weights at all; the interpreter, which is slow, has other dtypes in
    tests/devices/cuda/test_gemm.py."""
    if scheme is None:
        return True
    has_it = scheme.name in FACTS[SAME.get(device, device)].schemes
    return has_it and not refuses(device, scheme) and (device != "interpreter" or dtype == torch.float32)


def multiplies_experts(device: str, scheme: Scheme, **_: object) -> bool:
    """Whether the device takes experts with such weights."""
    return not (
        device == "npu" and isinstance(scheme, PackedInt) and scheme.bits == 8 and scheme.group_size > 0
    )


def random_weight(bench: Bench, scheme: Scheme, outs: int, ins: int, lead: tuple[int, ...] = ()) -> Quantized:
    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (*lead, *shape), generator=bench.generator)

    def floats(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(*lead, *shape).uniform_(low, high, generator=bench.generator)

    group = 0 if isinstance(scheme, Int8) else scheme.group_size
    num_groups = -(-ins // group) if group else 1
    tensors = {}
    if isinstance(scheme, PackedInt):
        tensors["weight"] = integers(0, 256, outs, ins * scheme.bits // 8).to(torch.uint8)
        tensors["scale"] = floats(0.5, 1.0, outs, num_groups) / 2**scheme.bits
        if scheme.has_zero_points:
            tensors["zeros"] = integers(1, 2**scheme.bits, outs, num_groups).to(torch.uint8)
        if scheme.has_g_idx:
            tensors["order"] = integers(0, num_groups, ins).int()
    elif isinstance(scheme, Fp8):
        tensors["weight"] = floats(-448, 448, outs, ins).to(torch.float8_e4m3fn)
        tensors["scale"] = floats(0.5e-3, 1e-3, outs, num_groups)
    else:
        tensors["weight"], tensors["scale"] = (
            integers(-128, 128, outs, ins).to(torch.int8),
            floats(2e-3, 4e-3, outs, 1),
        )
    if scheme.activations == "tensor":
        tensors["input_scale"] = floats(0.005, 0.006, 1) if isinstance(scheme, Fp8) else floats(0.02, 0.03, 1)
        if isinstance(scheme, Int8):
            tensors |= {"input_offset": integers(-9, 9, 1).float(), "sums": integers(-999, 999, outs).int()}
            tensors["scale"] *= tensors["input_scale"].unsqueeze(-1)
    return Quantized(scheme, **{name: tensor.to(bench.torch_device) for name, tensor in tensors.items()})


def meaning(weight: Quantized) -> Tensor:
    """W, column by column; float64 [out, in]."""
    scheme, scale = weight.scheme, weight.scale.double().cpu()
    if isinstance(scheme, Int8):
        return weight.weight.double().cpu() * scale
    values = weight.weight.cpu()
    if isinstance(scheme, PackedInt) and scheme.bits == 4:
        values = torch.stack((values % 16, values // 16), 2).flatten(1)
    columns = []
    for i in range(values.shape[1]):
        group = (
            int(weight.order[i])
            if weight.order is not None
            else i // scheme.group_size
            if scheme.group_size
            else 0
        )
        column = values[:, i].double()
        if isinstance(scheme, PackedInt):
            column = column - (
                2 ** (scheme.bits - 1) if weight.zeros is None else weight.zeros[:, group].double().cpu()
            )
        columns.append(column * scale[:, group])
    return torch.stack(columns, 1)


def expected(x: Tensor, weight: Quantized) -> Tensor:
    """float64 [N, out]; `x` is rounded in float32, as the definition has it."""
    scheme, given = weight.scheme, x.float().cpu()
    if scheme.activations == "tensor":
        assert weight.input_scale is not None
        scale = weight.input_scale.cpu()
        if isinstance(scheme, Fp8):
            return (
                (given / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()
            ) @ meaning(weight).T
        assert weight.input_offset is not None and weight.sums is not None
        codes = (given / scale + weight.input_offset.cpu()).round().clamp(-128, 127).double()
        return (
            codes @ weight.weight.double().cpu().T + weight.sums.double().cpu()
        ) * weight.scale.double().cpu().T
    if scheme.activations == "none":
        return given.double() @ meaning(weight).T
    group = scheme.group_size if isinstance(scheme, Fp8) and scheme.group_size else given.shape[1]
    rounded = []
    for part in given.split(group, 1):
        if isinstance(scheme, Fp8):
            scale = part.abs().amax(1, keepdim=True) / 448
            rounded.append((part / scale).to(torch.float8_e4m3fn).double() * scale.double())
        else:
            scale = part.abs().amax(1, keepdim=True) / 127
            rounded.append((part / scale).round().double() * scale.double())
    return torch.cat(rounded, 1) @ meaning(weight).T


def test_every_scheme_has_a_case(device: str, dtype: torch.dtype) -> None:
    assert {scheme.name for scheme in CASES} == set(SCHEMES)


@SCHEME
@pytest.mark.sampled(60, by="device")
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(bench: Bench, scheme: Scheme, rows: int, has_bias: bool) -> None:
    x, weight = bench.randn(rows, 64), random_weight(bench, scheme, 48, 64)
    bias = bench.randn(48) if has_bias else None
    wanted = expected(x, weight) + (0 if bias is None else bias.double().cpu())
    bench.near(bench.ops.linear(x, bench.ops.pack_quantized(weight), bias), wanted)


@SCHEME
def test_no_input_is_no_output(bench: Bench, scheme: Scheme) -> None:
    """A row of zeros has no largest value to divide by; what is beyond the largest float8 stays finite."""
    weight = random_weight(bench, scheme, 48, 64)
    x = bench.randn(3, 64) * torch.tensor([[0.0], [1.0], [1000.0]], device=bench.torch_device)
    found = bench.ops.linear(x.to(bench.dtype), bench.ops.pack_quantized(weight), None)
    assert bool(found.isfinite().all())
    if scheme != Int8("tensor"):
        assert bool((found[0] == 0).all())


@SCHEME
@pytest.mark.where(holds=multiplies_experts)
def test_experts(bench: Bench, scheme: Scheme) -> None:
    """Three experts of this rank, one of another."""
    x, gate_up, down = (
        bench.randn(3, 64) / 4,
        random_weight(bench, scheme, 64, 64, (3,)),
        random_weight(bench, scheme, 64, 32, (3,)),
    )
    ids = torch.tensor([[0, 1], [3, 1], [2, 0]], device=bench.torch_device)
    shares = torch.rand(3, 2, generator=bench.generator).to(bench.torch_device)
    wanted = torch.zeros(3, 64, dtype=torch.float64)
    for token in range(3):
        for expert, share in zip(ids[token].tolist(), shares[token].tolist(), strict=True):
            if expert < 3:
                gate, up = (
                    expected(x[token : token + 1], one_of(gate_up, expert))
                    .to(bench.dtype)
                    .double()
                    .chunk(2, 1)
                )
                inner = (gate / (1 + (-gate).exp()) * up).to(bench.dtype)
                wanted[token] += share * expected(inner, one_of(down, expert))[0]
    found = bench.experts.apply(x, ids, shares, bench.experts.pack_quantized(gate_up, down))
    if scheme.activations == "none":
        bench.near(found, wanted)
    else:  # what is rounded a second time may be on the edge of two codes
        assert (found.double().cpu() - wanted).abs().mean() < 0.02 * wanted.abs().mean()


def one_of(stack: Quantized, index: int) -> Quantized:
    names = ("weight", "scale", "zeros", "order", "input_scale", "input_offset", "sums")
    return Quantized(
        stack.scheme,
        **{name: tensor[index] for name in names if (tensor := getattr(stack, name)) is not None},
    )


@pytest.mark.parametrize("scheme", [Fp8(group_size=24), PackedInt(4, 24, has_zero_points=True)], ids=str)
def test_the_last_group_may_be_smaller(bench: Bench, scheme: Scheme) -> None:
    x, weight = bench.randn(3, 64), random_weight(bench, scheme, 40, 64)
    bench.near(bench.ops.linear(x, bench.ops.pack_quantized(weight), None), expected(x, weight))

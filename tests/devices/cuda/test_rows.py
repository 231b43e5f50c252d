"""Kernels over rows of activations, against plain torch."""

import pytest
import torch
from torch.nn import functional as F

from runtime.devices.cuda.kernels.activation import act_and_mul
from runtime.devices.cuda.kernels.norm import add_rms_norm, rms_norm
from runtime.devices.cuda.kernels.rotary import prepare_heads, rotary
from runtime.devices.cuda.kernels.store import store_kv
from runtime.layers.attention.kv_dtype import store_as
from tests.devices.cuda.torch_device import DTYPES, TOLERANCE, TORCH_DEVICE, near

NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers, the same for each shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(TORCH_DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 48, 1000, 4096])
def test_add_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(*shape, dtype=dtype) for shape in ((3, size), (4, size), (size,)))
    residual = residual[:3]
    total = (x + residual).double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    normed, kept = add_rms_norm(x, residual, weight, 1e-6)
    assert kept is residual
    near(kept, total, dtype)
    near(normed, expected, dtype, 2)


def test_norm_of_a_slice() -> None:
    """Heads of a projection that has more columns."""
    whole, weight = randn(3, 6, 40), randn(4, 40)
    x = whole[:, 1:5]
    near(
        rms_norm(x, weight, 1e-5),
        x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight,
        torch.float32,
    )


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations(kind: str) -> None:
    x = randn(3, 2 * 1500)
    gate, up = x.chunk(2, dim=1)
    act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda g: F.gelu(g, approximate="tanh")}[kind]
    near(act_and_mul(x, kind), act(gate) * up, torch.float32)


@pytest.mark.parametrize("kind", NARROW, ids=str)
def test_every_quantization_to_8_bits(kind: torch.dtype) -> None:
    """All numbers of the format, what lies between them, halfway too, what is too large, both signs, NaN: to
    the bit what torch makes."""
    known = torch.arange(256, dtype=torch.uint8).view(kind).float()
    known = known[known.isfinite()].unique()
    between = (known[1:] + known[:-1]) / 2
    numbers = torch.cat(
        (
            known,
            between,
            between * (1 + 1e-6),
            between * (1 - 1e-6),
            torch.tensor([1e9, -1e9, 1e-30, torch.nan]),
        )
    )
    numbers = F.pad(numbers, (0, -len(numbers) % 8)).view(-1, 1, 8)
    caches = [torch.zeros(numbers.shape).to(kind).to(TORCH_DEVICE) for _ in range(2)]
    store_kv(
        numbers.to(TORCH_DEVICE),
        numbers.to(TORCH_DEVICE),
        *caches,
        torch.arange(len(numbers), device=TORCH_DEVICE),
    )
    expected = torch.zeros(numbers.shape).to(kind)
    store_as(numbers, expected, torch.arange(len(numbers)))
    for cache in caches:
        assert torch.equal(cache.cpu().float().nan_to_num(nan=0.5), expected.float().nan_to_num(nan=0.5))


@pytest.mark.parametrize("joined", [False, True])
def test_caches_of_other_sizes(joined: bool) -> None:
    """Latents and rotary parts: one head each, of different sizes, also as one row for each token."""
    caches = [torch.zeros(8, 1, size, device=TORCH_DEVICE) for size in (24, 8)]
    if joined:
        caches = list(torch.zeros(8, 1, 32, device=TORCH_DEVICE).split((24, 8), 2))
    k, v = randn(3, 1, 24), randn(3, 1, 8)
    store_kv(k, v, *caches, torch.tensor([5, 0, 7], device=TORCH_DEVICE))
    assert torch.equal(caches[0][[5, 0, 7]], k) and torch.equal(caches[1][[5, 0, 7]], v)
    assert not caches[0][[1, 2, 3, 4, 6]].any()


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("kv_dtype", [None, *NARROW], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prepare_is_its_parts(dtype: torch.dtype, kv_dtype: torch.dtype | None, has_norms: bool) -> None:
    heads, kv_heads, dim = 4, 2, 24
    qkv, angles = randn(3, (heads + 2 * kv_heads) * dim, dtype=dtype), randn(3, dim // 2)
    cos, sin, at = angles.cos(), angles.sin(), torch.tensor([5, 0, 7], device=TORCH_DEVICE)
    weight = randn(heads + kv_heads, dim, dtype=dtype) if has_norms else None
    made, expected = (
        [torch.zeros(8, kv_heads, dim, device=TORCH_DEVICE).to(kv_dtype or dtype) for _ in range(2)]
        for _ in range(2)
    )
    q = prepare_heads(qkv, None if weight is None else (weight, 1e-5), cos, sin, *made, at)
    qk, v = qkv.unflatten(1, (-1, dim)).split((heads + kv_heads, kv_heads), dim=1)
    first, k = rotary(qk if weight is None else rms_norm(qk, weight, 1e-5), cos, sin).split(
        (heads, kv_heads), dim=1
    )
    store_kv(k, v, *expected, at)
    near(q, first, dtype)
    for found, wanted in zip(made, expected, strict=True):
        slack = 1.0 if kv_dtype is None else 0.3 / TOLERANCE[dtype]  # one step of an 8-bit float
        near(found.float(), wanted.float(), dtype, slack)

"""Attention of towers by our own kernel against the definition in float64, and whole towers with it against
the cpu's."""

from dataclasses import replace

import pytest
import torch

from runtime.devices.cpu.device import open_device
from runtime.devices.cuda.kernels.launch import INTERPRETER
from runtime.devices.cuda.towers import MOST_DIM, TritonTowers, open_towers
from runtime.models.vision.open_encoder import open_encoder
from runtime.models.vision.slices import finish
from tests.devices.cuda.torch_device import DTYPES, GPU, HAS_GPU, TORCH_DEVICE, near
from tests.devices.drive import start_rank
from tests.devices.towers import give_weights, media_of
from tests.models.towers import TOWERS

# groups, queries, keys, heads and their size: heads of CLIP, SigLIP, Qwen2-VL, Llama 4, and odd ones; windows
# of several images; the one query of SigLIP's pooling
SHAPES = [
    ((2,), 65, 65, 3, 64),
    ((1,), 150, 150, 2, 72),
    ((2, 3), 16, 16, 2, 80),
    ((1,), 70, 70, 2, 88),
    ((1,), 130, 130, 1, 128),
    ((2,), 1, 90, 2, 72),
    ((1,), 5, 7, 2, 20),
    ((1,), 9, 9, 1, 6),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize(("groups", "count", "keys", "heads", "dim"), SHAPES)
def test_every_query_sees_all_keys_of_its_group(
    groups: tuple[int, ...], count: int, keys: int, heads: int, dim: int, is_strided: bool, dtype: torch.dtype
) -> None:
    """Also of heads that are columns of one projection, as towers have them."""
    generator = torch.Generator().manual_seed(dim)

    def made(rows: int) -> torch.Tensor:
        joined = torch.randn(*groups, rows, 3, heads, dim, generator=generator)
        part = joined.to(dtype).to(TORCH_DEVICE)[..., 1, :, :].transpose(-3, -2)
        return part if is_strided else part.contiguous()

    q, k, v = made(count), made(keys), made(keys)
    found = TritonTowers(GPU)(q, k, v)
    weights = (q.double() @ k.double().mT * dim**-0.5).softmax(-1)
    assert found.shape == q.shape
    near(found, weights @ v.double(), dtype)


def test_large_heads_are_torchs() -> None:
    q = torch.randn(1, 2, 5, MOST_DIM + 8, device=TORCH_DEVICE)
    near(TritonTowers(GPU)(q, q, q), (q @ q.mT * q.shape[3] ** -0.5).softmax(-1) @ q, torch.float32)


def test_the_option_chooses_it() -> None:
    assert open_towers("sdpa", GPU) is None and isinstance(open_towers("triton_attn", GPU), TritonTowers)


@pytest.mark.skipif(HAS_GPU, reason="the device is the cpu's")
@pytest.mark.parametrize("name", TOWERS)
def test_rows_of_towers_are_those_of_the_cpu(name: str) -> None:
    """Windows, rotary positions in two dimensions, and pooling included."""
    config, cpu = TOWERS[name][0], open_device(start_rank(""), 0, torch.float32)
    calls: list[torch.Size] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append(q.shape)
        return TritonTowers(INTERPRETER)(q, k, v)

    encoders = [
        open_encoder(device, torch.float32, config) for device in (cpu, replace(cpu, tower_attention=attend))
    ]
    give_weights(encoders)
    with torch.inference_mode():
        expected, found = (finish(one.slices(media_of(name)))[0] for one in encoders)
    assert calls
    near(found, expected, torch.float32)

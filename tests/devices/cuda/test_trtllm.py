"""`--attention-backend trtllm_mha` against the definition in float64: a double holds calls to the source of
flashinfer-python, and on a GPU with the package, it is the package."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.devices.cuda.attention_backends import open_hybrid_backend
from runtime.devices.cuda.kernels.launch import INTERPRETER, gpu_of
from runtime.devices.cuda.ops import CudaOps
from tests.devices.cuda import latent_doubles
from tests.devices.cuda.test_attention import MIXED, Rows, by_the_book, fill
from tests.devices.cuda.test_attention_backends import CASES, check
from tests.devices.cuda.torch_device import HAS_GPU, TORCH_DEVICE, near

BF16, BLACKWELL = torch.bfloat16, (10, 0)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> CudaOps:
    """Ops with this backend for both phases."""
    if not HAS_GPU:
        latent_doubles.install(monkeypatch)
    elif find_spec("flashinfer") is None or torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("flashinfer is not installed here, or not for this GPU")
    gpu = gpu_of(TORCH_DEVICE) if HAS_GPU else INTERPRETER
    backend = open_hybrid_backend("trtllm_mha", "trtllm_mha", BF16, gpu, BLACKWELL)
    return CudaOps(BF16, gpu, attention_backend=backend)


@pytest.mark.parametrize("case", [name for name in CASES if name != "cap"])
def test_rows(case: str, ops: CudaOps) -> None:
    for _ in range(2):  # one workspace
        check(ops, MIXED, 3, CASES[case], dim=64)
        check(ops, [(40, 1), (0, 1)], 2, CASES[case], dim=128, page_size=32)


@pytest.mark.parametrize("case", [name for name in CASES if name != "cap"])
def test_captured_decodes(case: str, ops: CudaOps) -> None:
    """A body that has seen padding alone computes rows of any length."""
    rows: Rows = [(40, 1), (0, 1), (70, 1)]
    scores, cache = CASES[case], fill(rows, 2, (64, 64), 16, BF16, BF16)
    for x in (cache.keys, cache.values):
        x[:16] = 0
    table = torch.cat((cache.table, torch.zeros_like(cache.table[:, :1])), 1)  # a slot of padding
    slots = torch.full((3,), 3, device=TORCH_DEVICE)
    lengths = torch.ones(3, dtype=torch.int64, device=TORCH_DEVICE)
    q = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(3)).to(BF16).to(TORCH_DEVICE)

    def body() -> Tensor:
        assert ops.attention_backend is not None
        plan = ops.attention_backend.plan_decodes(slots, lengths, table, 16, tuple({0, scores.window}))
        return ops.attention(q, cache.keys, cache.values, plan, scores)

    body()
    slots.copy_(torch.arange(3))
    lengths.copy_(torch.from_numpy(np.array(rows, np.int64)[:, 0] + 1))
    expected = [by_the_book(q[i : i + 1], *cache.known[i], rows[i][0], scores) for i in range(3)]
    near(body(), torch.cat(expected), BF16)

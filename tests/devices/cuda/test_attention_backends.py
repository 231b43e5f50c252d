"""Other packages' attention behind --attention-backend against the definition in float64: each alone, and two
of them in a step."""

import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from runtime.devices.attention_backends import BACKENDS
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda import cudnn
from runtime.devices.cuda.attention_backends import BACKEND_CLASSES, open_hybrid_backend
from runtime.devices.cuda.kernels.launch import INTERPRETER, gpu_of
from runtime.devices.cuda.ops import CudaOps
from runtime.errors import StartError
from tests.devices.cuda import doubles
from tests.devices.cuda.test_attention import MIXED, Rows, by_the_book, fill
from tests.devices.cuda.torch_device import HAS_GPU, TORCH_DEVICE, near

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
SINKS = torch.tensor([-2.0, 0.0, 1.0, 5.0], device=TORCH_DEVICE)
CASES = {
    "plain": Scores(0.25),
    "window": Scores(0.25, 20),
    "cap": Scores(0.25, 0, 3.0),
    "sinks": Scores(0.25, 20, 0.0, SINKS),
}
HOPPER = (9, 0)
MODULES = {"flashinfer": "flashinfer", "fa3": "flash_attn_interface", "fa4": "flash_attn"}


def ops_of(prefill: str, decode: str, dtype: torch.dtype) -> CudaOps:
    """Ops with these backends."""
    gpu = gpu_of(TORCH_DEVICE) if HAS_GPU else INTERPRETER
    backend = open_hybrid_backend(prefill, decode, dtype, gpu, HOPPER)
    assert backend is not None
    backend.take_pages(())  # whose graphs are built as they are needed
    return CudaOps(dtype, gpu, attention_backend=backend)


def check(
    ops: CudaOps,
    rows: Rows,
    num_decodes: int,
    scores: Scores,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    page_size: int = 16,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Compares attention with the formula."""
    cache = fill(rows, heads[1], (dim, dim), page_size, ops.dtype, kv_dtype or ops.dtype)
    # the padding page is what a rank began with, or what padding wrote there
    for x in (cache.keys, cache.values):
        x.view(torch.uint8)[:page_size] = 0
    starts, counts = np.array(rows, np.int32).T
    plan = AttentionRows(num_decodes, np.arange(len(rows), dtype=np.int32), starts, counts)
    q = (
        torch.randn(int(counts.sum()), heads[0], dim, generator=torch.Generator().manual_seed(5))
        .to(ops.dtype)
        .to(TORCH_DEVICE)
    )
    metadata = ops.plan_attention(plan, cache.table, page_size, tuple({0, scores.window}))
    found = ops.attention(q, cache.keys, cache.values, metadata, scores)
    parts = zip(q.split(counts.tolist()), cache.known, starts.tolist(), strict=True)
    near(
        found, torch.cat([by_the_book(part, *pair, start, scores) for part, pair, start in parts]), ops.dtype
    )


@pytest.mark.parametrize("case", CASES)
def test_torch_native(case: str) -> None:
    ops = ops_of("torch_native", "torch_native", torch.float32)
    check(ops, MIXED, 3, CASES[case])
    check(ops, [(40, 1)], 1, CASES[case], page_size=1)
    check(ops, [(0, 5)], 0, CASES[case], kv_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("case", CASES)
def test_cudnn_has_prompts(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts and those behind prefixes; what torch's call does not know is for our kernel."""
    calls = []
    attend = cudnn.scaled_dot_product_attention

    def counted(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(options["is_causal"])
        return attend(*args, **options)

    monkeypatch.setattr(cudnn, "scaled_dot_product_attention", counted)
    ops = ops_of("cudnn", "triton", torch.float32)
    check(ops, MIXED, 3, CASES[case])
    check(ops, [(0, 5), (7, 9)], 0, CASES[case], page_size=4)
    assert calls[-2:] == ([True, False] if case == "plain" else [])
    check(ops_of("cudnn", "triton", torch.bfloat16), [(0, 5)], 0, CASES[case], kv_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("case", ["cap", "sinks"])
def test_flex_attention(case: str) -> None:
    """Which torch compiles for each shape, if only to run it eagerly: a few."""
    check(
        ops_of("flex_attention", "flex_attention", torch.float32),
        MIXED,
        3,
        CASES[case],
        kv_dtype=torch.float8_e4m3fn,
    )


@pytest.mark.parametrize(("prefill", "decode"), [("torch_native", "triton"), ("triton", "flex_attention")])
def test_each_phase_has_its_own(prefill: str, decode: str) -> None:
    check(ops_of(prefill, decode, torch.float32), MIXED, 3, CASES["window"])


def test_the_table_and_the_adapters_agree() -> None:
    offered = {name for name, facts in BACKENDS.items() if "cuda" in facts.devices and facts.has_adapter}
    assert offered == set(BACKEND_CLASSES)
    assert open_hybrid_backend("triton", "triton", torch.float32, INTERPRETER, HOPPER) is None


PACKAGES = ("flashinfer", "fa3", "fa4")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PACKAGES)
def test_packages(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubles hold the calls to the documents; on a GPU with the package, it is the package."""
    if not HAS_GPU:
        doubles.install(monkeypatch)
    elif find_spec(MODULES[name]) is None or torch.cuda.get_device_capability()[0] not in (
        BACKENDS[name].majors or (8, 9, 10, 12)
    ):
        pytest.skip(f"{name} is not installed here, or not for this GPU")
    ops = ops_of(name, name, torch.bfloat16)
    for _ in range(2):  # wrappers are kept
        check(ops, MIXED, 3, CASES[case], dim=64)
        check(ops, [(40, 1), (0, 1)], 2, CASES[case], dim=64, page_size=4)


@pytest.mark.skipif(HAS_GPU, reason="the double is the cpu's")
def test_flashinfer_reads_narrow_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    doubles.install(monkeypatch)
    check(
        ops_of("flashinfer", "flashinfer", torch.bfloat16),
        MIXED,
        3,
        CASES["window"],
        dim=64,
        kv_dtype=torch.float8_e4m3fn,
    )


@pytest.mark.skipif(HAS_GPU, reason="the tape is the cpu's")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PACKAGES)
def test_captured_decodes(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that has seen padding alone computes, behind `replan`, rows of any length: its wrappers and
    buffers are the same."""
    doubles.install(monkeypatch)
    ops, scores, page_size = ops_of(name, name, torch.bfloat16), CASES[case], 4
    cache = fill(lengths := [(40, 1), (0, 1), (7, 1)], 2, (64, 64), page_size, torch.bfloat16, torch.bfloat16)
    for x in (cache.keys, cache.values):
        x[:page_size] = 0
    table = torch.cat((cache.table, torch.zeros_like(cache.table[:, :1])), 1)  # a slot of padding
    slots, known = torch.full((3,), 3), torch.ones(3, dtype=torch.int64)
    q = torch.zeros(3, 4, 64, dtype=torch.bfloat16)
    assert ops.attention_backend is not None

    def body() -> tuple[Any, torch.Tensor]:
        assert ops.attention_backend is not None
        parts = ops.attention_backend.plan_decodes(slots, known, table, page_size, tuple({0, scores.window}))
        return parts, ops.attention(q, cache.keys, cache.values, parts, scores)

    parts, _ = body()
    slots.copy_(torch.arange(3))
    known.copy_(torch.tensor([start + 1 for start, _ in lengths]))
    q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(3)))
    for part in parts:
        part.backend.replan(part.metadata, known.numpy().astype(np.int32))
    _, found = body()
    near(
        found,
        torch.cat([by_the_book(q[i : i + 1], *cache.known[i], lengths[i][0], scores) for i in range(3)]),
        torch.bfloat16,
    )


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn_interface", "flash_attn", "flash_attn.cute", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        StartError, match=f"--attention-backend {name} needs the package {BACKENDS[name].package}"
    ):
        open_hybrid_backend(name, name, torch.bfloat16, INTERPRETER, HOPPER)
    with pytest.raises(StartError, match="computes in bfloat16 and float16"):
        open_hybrid_backend(name, "triton", torch.float32, INTERPRETER, HOPPER)


def test_cards_that_are_too_old() -> None:
    with pytest.raises(
        StartError, match=r"fa4 needs a GPU of compute capability 9.x, 10.x, 11.x, and this one has 8.0"
    ):
        open_hybrid_backend("triton", "fa4", torch.bfloat16, INTERPRETER, (8, 0))

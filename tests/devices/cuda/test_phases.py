"""Other packages' attention behind --attention-backend against the definition in float64: each alone, and two of them in a step."""


import numpy as np
import pytest
import torch

from runtime.devices.cuda.kernels.launch import INTERPRETER, card_of
from runtime.devices.cuda.ops import CudaOps
from runtime.devices.cuda.phases import KERNELS, open_phases
from runtime.devices.scores import Scores
from runtime.messages import StepPlan
from runtime.options.backends import BACKENDS
from tests.devices.cuda.place import HAS_CARD, PLACE, near
from tests.devices.cuda.test_attention import MIXED, NOTHING, Rows, by_the_book, fill

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
SINKS = torch.tensor([-2.0, 0.0, 1.0, 5.0], device=PLACE)
CASES = {"plain": Scores(0.25), "window": Scores(0.25, 20), "cap": Scores(0.25, 0, 3.0), "sinks": Scores(0.25, 20, 0.0, SINKS)}
HOPPER = (9, 0)


def ops_of(prefill: str, decode: str, dtype: torch.dtype) -> CudaOps:
    card = card_of(PLACE) if HAS_CARD else INTERPRETER
    return CudaOps(dtype, card, phases=open_phases(prefill, decode, dtype, card, HOPPER))


def check(ops: CudaOps, rows: Rows, num_decodes: int, scores: Scores, heads: tuple[int, int] = (4, 2), dim: int = 16,
          page_size: int = 16, kv_dtype: torch.dtype | None = None) -> None:
    cache = fill(rows, heads[1], (dim, dim), page_size, ops.dtype, kv_dtype or ops.dtype)
    for x in (cache.keys, cache.values):  # the padding page is what a rank began with, or what padding wrote there
        x.view(torch.uint8)[:page_size] = 0
    starts, counts = np.array(rows, np.int32).T
    plan = StepPlan(1, num_decodes, [], np.arange(len(rows), dtype=np.int32), starts, counts, np.ones(len(rows), np.uint8), *[NOTHING] * 5)
    q = torch.randn(int(counts.sum()), heads[0], dim, generator=torch.Generator().manual_seed(5)).to(ops.dtype).to(PLACE)
    planned = ops.plan_attention(plan, cache.table, page_size, tuple({0, scores.window}))
    found = ops.attention(q, cache.keys, cache.values, planned, scores)
    parts = zip(q.split(counts.tolist()), cache.known, starts.tolist(), strict=True)
    near(found, torch.cat([by_the_book(part, *pair, start, scores) for part, pair, start in parts]), ops.dtype)


@pytest.mark.parametrize("case", CASES)
def test_torch_native(case: str) -> None:
    ops = ops_of("torch_native", "torch_native", torch.float32)
    check(ops, MIXED, 3, CASES[case])
    check(ops, [(40, 1)], 1, CASES[case], page_size=1)
    check(ops, [(0, 5)], 0, CASES[case], kv_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("case", ["cap", "sinks"])
def test_flex_attention(case: str) -> None:
    """Which torch compiles for each shape, if only to run it eagerly: a few."""
    check(ops_of("flex_attention", "flex_attention", torch.float32), MIXED, 3, CASES[case], kv_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(("prefill", "decode"), [("torch_native", "triton"), ("triton", "flex_attention")])
def test_each_phase_has_its_own(prefill: str, decode: str) -> None:
    check(ops_of(prefill, decode, torch.float32), MIXED, 3, CASES["window"])


def test_the_table_and_the_adapters_agree() -> None:
    offered = {name for name, facts in BACKENDS.items() if "cuda" in facts.devices and facts.has_adapter}
    assert offered == set(KERNELS)
    assert open_phases("triton", "triton", torch.float32, INTERPRETER, HOPPER) is None

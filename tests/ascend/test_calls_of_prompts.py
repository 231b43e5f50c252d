"""Prompts whose rows have more pages together than the cache, or more keys than one call takes: several
calls, with the results of single ones."""

import numpy as np
import pytest
import torch

from runtime.devices.ascend import attention, mla
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from tests.ascend.emulate.table import Limits, Refused
from tests.devices.conformance import Bench

pytestmark = pytest.mark.ascend
PAGE, HEADS, KV_HEADS, DIM = 128, 4, 2, 128


@pytest.mark.parametrize(
    ("sizes", "limit", "runs"),
    [
        ([3, 3, 3], 9, [(0, 3)]),
        ([3, 3, 3], 8, [(0, 2), (2, 3)]),
        ([3, 9, 1], 4, [(0, 1), (1, 2), (2, 3)]),
        ([5], 4, [(0, 1)]),
    ],
)
def test_rows_of_each_call(sizes: list[int], limit: int, runs: list[tuple[int, int]]) -> None:
    assert attention.runs_within(sizes, limit) == [slice(*run) for run in runs]


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "dim", "layouts"),
    [
        (torch.bfloat16, 2, 128, ["TND"]),
        (torch.bfloat16, 4, 64, ["TND"]),
        (torch.float16, 4, 128, ["TND"]),
        (torch.float16, 2, 128, ["BSND"] * 3),
        (torch.bfloat16, 2, 64, ["BSND"] * 3),
        (torch.bfloat16, 4, 192, ["BSND"] * 3),
    ],
    ids=str,
)
def test_layout_of_prompts(
    dtype: torch.dtype,
    kv_heads: int,
    dim: int,
    layouts: list[str],
    window: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call where heads and dtype are documented for it, else one for each row; within the documented
    limits, and with torch's numbers."""
    monkeypatch.setattr(Limits, "strict", True)
    bench, calls = Bench("npu", dtype), []
    torch.manual_seed(0)
    k, v = (bench.randn(8 * PAGE, kv_heads, dim) for _ in range(2))
    table = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32).npu().unsqueeze(0)
    counts, starts = np.array([40, 2, 9], np.int32), np.array([3, 150, 0], np.int32)
    rows = AttentionRows(0, np.arange(3, dtype=np.int32), starts, counts)
    q, scores = bench.randn(51, HEADS, dim), Scores(dim**-0.5, window)
    plan = bench.ops.plan_attention(rows, table, PAGE, (window,))
    call = attention.torch_npu.npu_fused_infer_attention_score

    def listed(*args: object, **named: object) -> object:
        calls.append(named["input_layout"])
        return call(*args, **named)

    monkeypatch.setattr(attention.torch_npu, "npu_fused_infer_attention_score", listed)
    found = bench.ops.attention(q, k, v, plan, scores)
    assert calls == layouts
    begin = 0
    for count, start, pages in zip(counts.tolist(), starts.tolist(), table[0].tolist(), strict=True):
        places = torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)][: start + count])
        keys, values = k.cpu()[places].double(), v.cpu()[places].double()
        at = torch.arange(start, start + count).unsqueeze(1)
        seen = torch.arange(start + count) <= at
        if window:
            seen &= torch.arange(start + count) > at - window
        expected = torch.nn.functional.scaled_dot_product_attention(
            q.cpu()[begin : begin + count].double().transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=seen,
            enable_gqa=True,
        )
        bench.near(found[begin : begin + count], expected.transpose(0, 1))
        begin += count


@pytest.mark.parametrize("window", [0, 300])
def test_rows_that_share_a_prefix_in_a_small_cache(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows that share 5 pages in a cache of 12: 42 pages, which one call would be refused for."""
    bench = Bench("npu", torch.bfloat16)
    torch.manual_seed(0)
    prefix, rows, num_pages = 5, 7, 12
    k, v = (bench.randn(num_pages * PAGE, KV_HEADS, DIM) for _ in range(2))
    table = torch.tensor([[*range(prefix), prefix + row] for row in range(rows)], dtype=torch.int32)
    counts = np.array([40, 2, 9, 128, 3, 60, 17], np.int32)
    starts, slots = np.full(rows, prefix * PAGE, np.int32), np.arange(rows, dtype=np.int32)
    q, scores = bench.randn(int(counts.sum()), HEADS, DIM), Scores(DIM**-0.5, window)
    tables = table.npu().unsqueeze(0)

    def attend(of: slice, queries: torch.Tensor) -> torch.Tensor:
        plan = bench.ops.plan_attention(
            AttentionRows(0, slots[of], starts[of], counts[of]), tables, PAGE, (window,)
        )
        return bench.ops.attention(queries, k, v, plan, scores)

    found = attend(slice(rows), q)
    ends = counts.cumsum()
    for row, end in enumerate(ends):
        own = slice(int(end - counts[row]), int(end))
        assert torch.equal(found[own], attend(slice(row, row + 1), q[own]))
    monkeypatch.setattr(attention, "runs_within", lambda sizes, limit: [slice(0, len(sizes))])
    if not window:
        with pytest.raises(Refused, match="42 pages of all rows in a cache of 12"):
            attend(slice(rows), q)


def test_expanded_rows_of_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.array([300, 200, 180, 500], np.int32)
    starts, slots = np.array([0, 100, 0, 0], np.int32), np.arange(4, dtype=np.int32)
    tables = torch.zeros(4, 4, dtype=torch.int32, device="npu")

    def plan() -> mla.MlaPlan:
        mask = attention.triangle(tables.device)
        return mla.plan_mla(
            AttentionRows(0, slots, starts, counts), tables, PAGE, mask, mla.MAX_QUERIES, is_nz=False
        )

    assert [rows.key_ends for rows in plan().expanded] == [[300, 600, 780, 1280]]
    monkeypatch.setattr(mla, "MAX_KEYS", 600)
    found = plan().expanded
    assert [rows.key_ends for rows in found] == [[300, 600], [180], [500]]
    assert [rows.ends for rows in found] == [[300, 500], [180], [500]]
    assert [rows.queries for rows in found] == [slice(0, 500), slice(500, 680), slice(680, 1180)]

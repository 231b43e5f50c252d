"""DeepSeek sparse attention: chosen positions, attention over them, and refusals."""

from typing import Any

import pytest
import torch
import torch_npu

from tests.ascend.calls import ints, randn
from tests.ascend.emulate.table import Refused
from tests.ascend.test_numbers import near, plain

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]
FP32 = torch.float32
ENDS, LENGTHS, TABLE = [2, 5], [40, 20], [[3, 1, 0], [2, 0, 0]]
WHERE: dict[str, Any] = {"layout_query": "TND", "sparse_mode": 3}


def lengths(kind: str) -> dict[str, Any]:
    return {
        "actual_seq_lengths_query": ints(*ENDS),
        f"actual_seq_lengths_{kind}": ints(*LENGTHS),
        "block_table": ints(*TABLE),
    }


def indexed(count: int, **more: Any) -> Any:
    torch.manual_seed(0)
    query, key, weights = (
        randn(5, 4, 128, dtype=FP32),
        randn(4, 16, 1, 128, dtype=FP32),
        randn(5, 4, dtype=FP32),
    )
    named = {"layout_key": "PA_BSND", "sparse_count": count, **lengths("key"), **WHERE, **more}
    found, _ = torch_npu.npu_lightning_indexer(query, key, weights, **named)
    return query, key, weights, found


def test_the_indexer_takes_the_best_visible_positions() -> None:
    query, key, weights, found = indexed(24)
    assert found.shape == (5, 1, 24)
    start = 0
    for end, length, pages in zip(ENDS, LENGTHS, TABLE, strict=True):
        keys = key.cpu()[pages].flatten(0, 2)[:length]
        for at in range(start, end):
            visible = length - (end - 1 - at)
            scores = sum(
                float(w) * (keys[:visible] @ q).relu()
                for w, q in zip(weights.cpu()[at], query.cpu()[at], strict=True)
            )
            best = scores.topk(min(24, visible)).indices
            row = [p for p in found[at, 0].tolist() if p >= 0]
            assert sorted(row) == sorted(best.tolist())
        start = end


def test_attention_over_chosen_positions() -> None:
    *_, found = indexed(24)
    q, q_rope = randn(5, 8, 512, dtype=FP32) / 9, randn(5, 8, 64, dtype=FP32) / 9
    latents, ropes = randn(4, 16, 1, 512, dtype=FP32), randn(4, 16, 1, 64, dtype=FP32)
    out = torch_npu.npu_sparse_flash_attention(
        q,
        latents,
        latents,
        found,
        0.1,
        query_rope=q_rope,
        key_rope=ropes,
        layout_kv="PA_BSND",
        attention_mode=2,
        **lengths("kv"),
        **WHERE,
    )[0]
    start = 0
    for end, pages in zip(ENDS, TABLE, strict=True):
        keys, rope = (x.cpu()[pages].flatten(0, 1) for x in (latents, ropes))
        for at in range(start, end):
            row = [p for p in found[at, 0].tolist() if p >= 0]
            whole = torch.cat((q.cpu()[at], q_rope.cpu()[at]), -1)[None]
            value = torch.nn.functional.pad(keys[row], (0, 64))
            near(out[at], plain(whole, torch.cat((keys[row], rope[row]), -1), value, None, 0.1)[0, :, :512])
        start = end


@pytest.mark.parametrize(
    ("why", "more"),
    [
        ("sparse_count", {"sparse_count": 2049}),
        ("sparse_mode", {"sparse_mode": 2}),
        ("TND", {"layout_query": "BSND"}),
        ("default", {"pre_tokens": 5}),
    ],
)
def test_the_indexer_refuses(why: str, more: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=why):
        indexed(more.pop("sparse_count", 24), **more)


def test_positions_that_a_query_does_not_see_are_refused() -> None:
    *_, found = indexed(24)
    found[0, 0, 0] = 39  # the first of two queries sees 39 keys: 0 .. 38
    q, q_rope, latents, ropes = randn(5, 8, 512), randn(5, 8, 64), randn(4, 16, 1, 512), randn(4, 16, 1, 64)
    with pytest.raises(Refused, match="beyond the 39 keys"):
        torch_npu.npu_sparse_flash_attention(
            q,
            latents,
            latents,
            found,
            0.1,
            query_rope=q_rope,
            key_rope=ropes,
            layout_kv="PA_BSND",
            attention_mode=2,
            **lengths("kv"),
            **WHERE,
        )

"""DeepSeek sparse attention: chosen positions, attention over them, and refusals."""

from typing import Any

import pytest
import torch
import torch_npu

from tests.ascend.calls import ints, randn
from tests.ascend.emulate.table import Limits, Refused
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


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch_npu.npu_dynamic_quant(x)
    return codes, scales.half()


def indexed_in_8_bits(count: int, **more: Any) -> Any:
    torch.manual_seed(0)
    query, key = quantised(randn(5, 4, 128)), quantised(randn(4, 16, 1, 128))
    weights = randn(5, 4, dtype=torch.float16)
    named = {"layout_key": "PA_BSND", "sparse_count": count, "query_quant_mode": 0, "key_quant_mode": 0}
    named |= lengths("key") | WHERE | more
    found = torch_npu.npu_quant_lightning_indexer(query[0], key[0], weights, query[1], key[1], **named)
    return query, key, weights, found


def test_the_indexer_of_8_bits_takes_what_dequantized_keys_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "strict", True)
    query, key, weights, found = indexed_in_8_bits(12)
    monkeypatch.setattr(Limits, "strict", False)
    whole = [codes.float() * scales.float()[..., None] for codes, scales in (query, key)]
    named = {"layout_key": "PA_BSND", "sparse_count": 12, **lengths("key"), **WHERE}
    expected, _ = torch_npu.npu_lightning_indexer(*whole, weights.float(), **named)
    assert torch.equal(found.cpu(), expected.cpu())


@pytest.mark.parametrize(
    ("why", "more"),
    [
        ("sparse_count", {"sparse_count": 3072}),
        ("sparse_mode", {"sparse_mode": 2}),
        ("quant modes", {"key_quant_mode": 1}),
        ("TND", {"layout_query": "BSND"}),
    ],
)
def test_the_indexer_of_8_bits_refuses(why: str, more: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=why):
        indexed_in_8_bits(more.pop("sparse_count", 12), **more)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32], ids=str)
def test_index_keys_of_8_bits_in_the_cache(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen positions, and so attention, are those that dequantized keys have; codes and scales are in the
    pages of the model's dtype."""
    from runtime.devices.ascend.ops import AscendOps
    from runtime.devices.ascend.sparse_latents import AscendSparseLatents, Int8Index, PlainIndex
    from runtime.models.config.mla_config import IndexerConfig, MlaConfig

    monkeypatch.setattr(Limits, "strict", dtype != FP32)
    torch_device = torch.device("npu", 0)
    ops = AscendOps(dtype, 16, torch_device, is_sparse=True, has_int8_index=True)
    indexer = IndexerConfig(num_heads=4, dim=128, top_k=6)
    sizes = {"kv_rank": 512, "q_rank": 64, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    mla = MlaConfig(**sizes, is_interleaved=False, indexer=indexer)
    sparse = AscendSparseLatents(ops)
    dims = sparse.cache_dims(mla)
    assert dims == (512, 64, 128 // dtype.itemsize, 1)
    caches = [torch.zeros(4 * 16, 1, dim, dtype=dtype, device=torch_device) for dim in dims]
    torch.manual_seed(0)
    keys, locations = randn(40, 1, 128, dtype=dtype), torch.arange(3 * 16 + 15, 3 * 16 - 25, -1).npu()
    queries, weights = randn(5, 4, 128, dtype=dtype), randn(5, 4, dtype=dtype)
    index = Int8Index(dtype)
    index.store(keys, tuple(caches[2:]), locations)
    rows = {"layout_key": "PA_BSND", "sparse_count": 6, **lengths("key"), **WHERE}
    found = index.choose(queries, weights, tuple(caches[2:]), 16, rows)
    monkeypatch.setattr(Limits, "strict", False)
    plain_keys = torch.zeros(4 * 16, 1, 128, device=torch_device)
    codes, scales = torch_npu.npu_dynamic_quant(keys)
    plain_keys[locations] = codes.float() * scales.to(index.scale_dtype).float()[..., None]
    codes, scales = torch_npu.npu_dynamic_quant(queries)
    whole = codes.float() * scales.to(index.scale_dtype).float()[..., None]
    rounded = weights.to(index.scale_dtype).float()
    expected = PlainIndex().choose(whole, rounded, (plain_keys,), 16, rows)
    assert torch.equal(found.cpu(), expected.cpu())

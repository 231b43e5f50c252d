"""The emulated operators against formulas written another way: loops and scaled_dot_product_attention."""

import math
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional as F

from tests.ascend.calls import ints, mask, randn

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]
FP32 = torch.float32
FIA = torch_npu.npu_fused_infer_attention_score


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.cpu().double(), expected.cpu().double(), atol=tolerance, rtol=tolerance)


def plain(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """q (s, n, d), k and v (t, kn, d)."""
    seen = None if hidden is None else ~hidden
    heads_first = (x.transpose(0, 1)[None].double() for x in (q, k, v))
    found = F.scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=scale, enable_gqa=True)
    return found[0].transpose(0, 1)


LAYOUTS = {  # of a cache (pages, 128, 2, 64)
    "tokens": lambda c: c.flatten(2),
    "heads": lambda c: c.transpose(1, 2).contiguous(),
    "nz": lambda c: c.unflatten(-1, (4, 16)).permute(0, 2, 3, 1, 4).contiguous(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("mode", "before", "after"), [(3, 0, 0), (4, 99, 0), (4, 40, -3)])
def test_paged_attention(layout: str, mode: int, before: int, after: int) -> None:
    q = randn(207, 8, 64, dtype=FP32)
    k, v = (randn(6, 128, 2, 64, dtype=FP32) for _ in range(2))
    table, lengths, kv = [[3, 5, 0], [1, 0, 0], [2, 4, 1]], [3, 4, 200], [131, 70, 300]
    found, lse = FIA(
        q,
        LAYOUTS[layout](k),
        LAYOUTS[layout](v),
        atten_mask=mask(),
        block_table=ints(*table),
        input_layout="TND",
        actual_seq_lengths=[3, 7, 207],
        actual_seq_lengths_kv=kv,
        block_size=128,
        num_heads=8,
        num_key_value_heads=2,
        scale=0.125,
        sparse_mode=mode,
        pre_tokens=before,
        next_tokens=after,
        softmax_lse_flag=True,
    )
    assert lse.shape == (207, 8, 1)
    start = 0
    for row, s, t in zip(table, lengths, kv, strict=True):
        keys, values = (c.cpu()[row].flatten(0, 1)[:t] for c in (k, v))
        i, j = torch.arange(s)[:, None] + t - s, torch.arange(t)[None]
        hidden = j > i if mode == 3 else (j > i + after) | (j < i - before)
        rows = q.cpu()[start : start + s]
        near(found[start : start + s], plain(rows, keys, values, hidden, 0.125))
        scores = torch.einsum("snd,tnd->nst", rows.double(), keys.double().repeat_interleave(4, 1)) * 0.125
        near(lse[start : start + s, :, 0], scores.masked_fill(hidden, -torch.inf).exp().sum(-1).log().t())
        start += s


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_decoding_in_batches(layout: str) -> None:
    q, k, v = randn(2, 1, 8, 64, dtype=FP32), randn(4, 128, 128, dtype=FP32), randn(4, 128, 128, dtype=FP32)
    shaped = {"BSH": q.flatten(2), "BSND": q, "BNSD": q.transpose(1, 2).contiguous()}[layout]
    found = FIA(
        shaped,
        k,
        v,
        block_table=ints([2, 1], [0, 3]),
        actual_seq_lengths_kv=[200, 7],
        input_layout=layout,
        block_size=128,
        num_heads=8,
        num_key_value_heads=2,
        scale=0.2,
    )[0]
    assert found.shape == shaped.shape
    for index, (row, t) in enumerate(zip([[2, 1], [0, 3]], [200, 7], strict=True)):
        keys, values = (c.cpu()[row].flatten(0, 1)[:t].unflatten(-1, (2, 64)) for c in (k, v))
        near(found[index].reshape(8, 64), plain(q.cpu()[index], keys, values, None, 0.2)[0])


@pytest.mark.parametrize("version", [1, 2])
def test_latent_attention(version: int) -> None:
    """Absorbed: keys are latents and rotary parts, values the latents."""
    q, q_rope = randn(2, 1, 32, 512, dtype=FP32) / 9, randn(2, 1, 32, 64, dtype=FP32) / 9
    latents, ropes = randn(4, 128, 512, dtype=FP32), randn(4, 128, 64, dtype=FP32)
    common: dict[str, Any] = {
        "query_rope": q_rope,
        "key_rope": ropes,
        "block_table": ints([2, 1], [0, 3]),
        "input_layout": "BSND",
        "block_size": 128,
        "num_key_value_heads": 1,
    }
    if version == 1:
        found = FIA(q, latents, latents, **common, actual_seq_lengths_kv=[200, 7], num_heads=32, scale=0.1)[0]
    else:
        found = torch_npu.npu_fused_infer_attention_score_v2(
            q, latents, latents, **common, actual_seq_kvlen=[200, 7], num_query_heads=32, softmax_scale=0.1
        )[0]
    for index, (row, t) in enumerate(zip([[2, 1], [0, 3]], [200, 7], strict=True)):
        latent, rope = (c.cpu()[row].flatten(0, 1)[:t, None] for c in (latents, ropes))
        whole = torch.cat((q.cpu()[index], q_rope.cpu()[index]), -1)
        near(
            found[index],
            plain(whole, torch.cat((latent, rope), -1), F.pad(latent, (0, 64)), None, 0.1)[..., :512],
        )


def test_parts_of_one_attention_join() -> None:
    q, k, v = randn(5, 8, 128, dtype=FP32), randn(90, 8, 128, dtype=FP32), randn(90, 8, 128, dtype=FP32)
    named = {
        "input_layout": "TND",
        "num_heads": 8,
        "num_key_value_heads": 8,
        "scale": 0.1,
        "actual_seq_lengths": [5],
    }
    parts = [
        FIA(
            q,
            k[at].contiguous(),
            v[at].contiguous(),
            actual_seq_lengths_kv=[size],
            softmax_lse_flag=True,
            **named,
        )
        for at, size in ((slice(0, 40), 40), (slice(40, 90), 50))
    ]
    whole, lse = FIA(q, k, v, actual_seq_lengths_kv=[90], softmax_lse_flag=True, **named)
    found, logs = torch_npu.npu_attention_update(
        [part[1].flatten() for part in parts], [part[0].flatten(0, 1) for part in parts], 1
    )
    near(found.view_as(whole), whole)
    near(logs.view_as(lse), lse)


def test_rotary_forms_agree() -> None:
    x, angles = randn(5, 8, 64, dtype=FP32), torch.rand(5, 32) * 6
    cos, sin = (torch.cat((f(angles),) * 2, -1)[:, None].npu() for f in (torch.cos, torch.sin))
    plane = torch.complex(x.cpu()[..., :32].double(), x.cpu()[..., 32:].double())
    pairs = plane * torch.polar(torch.ones(5, 1, 32).double(), angles[:, None].double())
    expected = torch.cat((pairs.real, pairs.imag), -1)
    near(torch_npu.npu_rotary_mul(x[None], cos[None], sin[None])[0], expected)
    mixed = torch.stack((x[..., :32], x[..., 32:]), -1).flatten(-2)  # even elements are the first half
    near(
        torch_npu.npu_interleave_rope(mixed[:, :, None].contiguous(), cos[:, :, None], sin[:, :, None])[
            :, :, 0
        ],
        expected,
    )
    query, key = x.clone(), x[:, :2].clone()
    out = torch_npu.npu_apply_rotary_pos_emb(query, key, cos, sin, layout="TND")
    near(out[0], expected)
    near(key, expected[:, :2])
    assert out[0].data_ptr() == query.data_ptr(), "it works in place"


def test_quantised_products() -> None:
    x, weight = randn(7, 64), torch.randn(64, 96)
    scale = weight.abs().amax(0) / 127
    whole = (weight / scale).round().to(torch.int8)
    quantised, tokens = torch_npu.npu_dynamic_quant(x)
    near(quantised.float() * tokens[:, None], x.float(), 0.03)
    for w in (whole.npu(), torch_npu.npu_format_cast(whole.npu(), 29)):
        y = torch_npu.npu_quant_matmul(
            quantised, w, scale.npu(), pertoken_scale=tokens, output_dtype=torch.bfloat16
        )
        near(
            y,
            (quantised.cpu().double() * tokens.cpu().double()[:, None]) @ (whole.double() * scale.double()),
            0.02,
        )
    packed = torch_npu.npu_trans_quant_param(scale.npu())
    static = torch_npu.npu_quantize(
        x, torch.full((1,), 30.0, device="npu", dtype=torch.bfloat16), None, torch.qint8, -1, False
    )
    assert torch.equal(static.cpu(), (x.cpu().float() * 30).round().clamp(-128, 127).to(torch.int8))
    y = torch_npu.npu_quant_matmul(static, whole.npu(), packed, output_dtype=torch.float16)
    near(y, static.cpu().double() @ whole.double() * scale.double(), 2.0)


@pytest.mark.parametrize("group", [0, 32])
def test_products_of_packed_weights(group: int) -> None:
    x, numbers = randn(4, 64), torch.randint(-8, 8, (64, 96), dtype=torch.int32)
    scale = (torch.rand(96) if not group else torch.rand(2, 96)).to(torch.bfloat16)
    packed = torch_npu.npu_convert_weight_to_int4pack(numbers.npu())
    assert packed.shape == (64, 12)
    y = torch_npu.npu_weight_quant_batchmatmul(x, packed, scale.npu(), antiquant_group_size=group)
    whole = numbers.double() * (scale.double().repeat_interleave(group, 0) if group else scale.double())
    near(y, x.cpu().double() @ whole, 0.5)


def chosen(x: Tensor, weights: list[Tensor], ids: Tensor, shares: Tensor) -> Tensor:
    """The mixture, token by token."""
    return torch.stack(
        [
            sum(
                share * (row.double() @ weights[expert].double())
                for expert, share in zip(each, some, strict=True)
            )
            for row, each, some in zip(x, ids.tolist(), shares.double(), strict=True)
        ]
    )


@pytest.mark.parametrize(("kind", "back"), [(0, 2), (0, 0)])
def test_moe(kind: int, back: int) -> None:
    x, weight = randn(5, 32, dtype=FP32), randn(4, 32, 48, dtype=FP32)
    shares, ids, _ = torch_npu.npu_moe_gating_top_k_softmax(randn(5, 4, dtype=FP32), k=2)
    rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x,
        ids,
        active_num=10,
        expert_num=4,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, 4],
        quant_mode=-1,
        row_idx_type=kind,
    )
    y = torch_npu.npu_grouped_matmul(
        [rows], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
    )[0]
    expected = chosen(x.cpu(), list(weight.cpu()), ids.cpu(), shares.cpu())
    if back == 0:  # all first choices, then all second ones
        places = places.view(5, 2).t().reshape(-1).contiguous()
    near(
        torch_npu.npu_moe_finalize_routing(y, None, None, None, shares, places, None, drop_pad_mode=back),
        expected,
    )
    near(
        torch_npu.npu_moe_token_unpermute(
            y, places if back == 2 else places.view(2, 5).t().reshape(-1).contiguous(), shares
        ),
        expected,
    )
    permuted, sorted_places = torch_npu.npu_moe_token_permute(x, ids)
    assert torch.equal(permuted.cpu(), rows.cpu()) and torch.equal(sorted_places.cpu(), places.cpu()) == (
        back == 2
    )


def test_groups_of_experts_are_chosen_as_deepseek_does() -> None:
    x, bias = randn(6, 32, dtype=FP32), randn(32, dtype=FP32)
    shares, ids, _ = torch_npu.npu_moe_gating_top_k(
        x, 4, bias=bias, k_group=2, group_count=4, group_select_mode=1, norm_type=1, routed_scaling_factor=2.5
    )
    scores = x.cpu().sigmoid()
    for row in range(6):
        choice = scores[row] + bias.cpu()
        groups = sorted(range(4), key=lambda g: -float(choice[8 * g : 8 * g + 8].topk(2).values.sum()))[:2]
        allowed = [e for g in groups for e in range(8 * g, 8 * g + 8)]
        best = sorted(allowed, key=lambda e: -float(choice[e]))[:4]
        assert ids[row].tolist() == best
        near(shares[row], scores[row][best] / scores[row][best].sum() * 2.5)


def test_top_k_and_top_p() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 3.0, 0.0], [1.0, 1.0, 1.0, 5.0, 0.0]], device="npu")
    only_k = torch_npu.npu_top_k_top_p(logits, k=ints(2, 2))
    # equal ones all stay
    assert only_k.isfinite().cpu().tolist() == [
        [True, False, False, True, False],
        [True, True, True, True, False],
    ]
    only_p = torch_npu.npu_top_k_top_p(logits, p=torch.tensor([0.9, 0.0], device="npu"))
    assert only_p.isfinite().cpu().tolist() == [
        [True, True, False, True, False],
        [False, False, False, True, False],
    ]


def test_the_prolog_is_its_parts() -> None:
    tokens, heads, hidden, q_rank, rank, nope, rope = 3, 4, 64, 32, 32, 16, 16
    x, w_uk = randn(tokens, hidden, dtype=FP32), randn(heads, nope, rank, dtype=FP32)
    cast = [
        torch_npu.npu_format_cast(randn(*shape, dtype=FP32) / 8, 29)
        for shape in ((hidden, q_rank), (q_rank, heads * (nope + rope)), (hidden, rank + rope))
    ]
    gammas = randn(q_rank, dtype=FP32), randn(rank, dtype=FP32)
    sin, cos = randn(tokens, rope, dtype=FP32), randn(tokens, rope, dtype=FP32)
    caches = [torch.zeros(2, 16, 1, size, device="npu") for size in (rank, rope)]
    slots = torch.tensor([0, 17, 5], device="npu")
    query, query_rope, *_ = torch_npu.npu_mla_prolog_v3(
        x, cast[0], cast[1], w_uk, cast[2], *gammas, sin, cos, *caches, cache_index=slots
    )
    compressed = torch_npu.npu_rms_norm(x @ cast[0], gammas[0], 1e-5)[0]
    q = (compressed @ cast[1]).view(tokens, heads, nope + rope)
    near(query, torch.einsum("thd,hdr->thr", q[..., :nope].cpu(), w_uk.cpu()), 1e-4)
    turned = torch_npu.npu_interleave_rope(
        q[..., nope:][:, :, None].contiguous(), cos[:, None, None], sin[:, None, None]
    )
    near(query_rope, turned[:, :, 0], 1e-4)
    others = [torch.zeros(2, 16, 1, size, device="npu") for size in (rope, rank)]
    kv = (x @ cast[2]).view(1, 1, tokens, rank + rope)
    torch_npu.npu_kv_rmsnorm_rope_cache(
        kv, gammas[1], cos[None, None], sin[None, None], slots, *others, cache_mode="PA_BNSD"
    )
    near(caches[0], others[1], 1e-4)
    near(caches[1], others[0], 1e-4)


def test_a_gate_with_clamped_halves() -> None:
    x = 6 * randn(3, 8, dtype=FP32)
    halves = torch_npu.npu_clipped_swiglu(x, interleaved=False).cpu()
    columns = torch_npu.npu_clipped_swiglu(x, alpha=0.5, limit=2.0, bias=0.0).cpu()
    for row, values in enumerate(x.tolist()):
        for i in range(4):
            gate, up = min(values[i], 7.0), max(-7.0, min(values[4 + i], 7.0))
            near(halves[row, i], torch.tensor(gate / (1 + math.exp(-1.702 * gate)) * (up + 1)))
            gate, up = min(values[2 * i], 2.0), max(-2.0, min(values[2 * i + 1], 2.0))
            near(columns[row, i], torch.tensor(gate / (1 + math.exp(-0.5 * gate)) * up))


def test_norms_rotations_and_the_store_in_one() -> None:
    """Three tokens of two query heads and a key head, against the operators that it stands for."""
    qkv, angles = randn(3, 4 * 128, dtype=FP32), torch.rand(3, 64)
    cos, sin = (torch.cat((half, half), 1).npu() for half in (angles.cos(), angles.sin()))
    q_norm, k_norm = randn(128, dtype=FP32), randn(128, dtype=FP32)
    q_out, slots = torch.zeros(3, 256, device="npu"), [40, 0, 33]
    caches = [torch.zeros(2, 8, 32, 16, device="npu") for _ in range(2)]
    torch_npu.npu_qkv_rms_norm_rope_cache(
        *(qkv, q_norm, k_norm, cos, sin, ints(*slots, dtype=torch.int64), q_out),
        *caches,
        [1, 3, 4, 128],
        [2, 1, 1],
    )
    heads = qkv.view(1, 3, 4, 128)
    parts = [
        torch_npu.npu_rotary_mul(
            torch_npu.npu_rms_norm(x, weight)[0], cos.view(1, 3, 1, 128), sin.view(1, 3, 1, 128)
        )[0].cpu()
        for x, weight in ((heads[:, :, :2], q_norm), (heads[:, :, 2:3], k_norm))
    ]
    near(q_out.view(3, 2, 128), parts[0])
    for found, expected in zip(caches, (parts[1], heads[0, :, 3:].cpu()), strict=True):
        tokens = found.cpu().permute(0, 2, 1, 3).reshape(64, 128)
        near(tokens[slots], expected[:, 0])
        assert int(tokens.any(1).sum()) == 3, "other slots are as they were"

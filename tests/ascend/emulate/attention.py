"""npu_fused_infer_attention_score (FIA) in its forms, and npu_fusion_attention, which
scaled_dot_product_attention becomes."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.ascend.emulate.score import BATCHED, Score, check
from tests.ascend.emulate.table import Refused, need, need_values, operator

V1 = "npu::npu_fused_infer_attention_score"
V2 = "npu::npu_fused_infer_attention_score_v2"
QUERIES = 256  # computed at a time
V2_NAMES = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "return_softmax_lse": "softmax_lse_flag",
}


def paged_tokens(cache: Tensor, pages: Tensor, length: int, heads: int) -> Tensor:
    """The first `length` tokens of a sequence as (length, heads, head size), from any of the three
    layouts."""
    ids = pages.long()
    need_values(
        lambda: ((ids >= 0) & (ids < cache.shape[0])).all(),
        f"pages {ids.tolist()} in a cache of {cache.shape[0]}",
    )
    if cache.dim() == 3:  # (pages, page size, heads * head size)
        found = cache[ids].reshape(-1, heads, cache.shape[-1] // heads)
    elif cache.dim() == 4:  # (pages, heads, page size, head size)
        found = cache[ids].permute(0, 2, 1, 3).reshape(-1, heads, cache.shape[-1])
    else:  # NZ: (pages, heads, head size / 16, page size, 16)
        found = cache[ids].permute(0, 3, 1, 2, 4).reshape(-1, heads, cache.shape[2] * cache.shape[4])
    return found[:length]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """q (s, n, d), k and v (t, kn, d) -> (s, n, dv) and the log of the sum of exponentials (s, n); rows that
    see nothing are 0."""
    # in parts, each without the keys behind those that it sees
    if len(q) > QUERIES and hidden is not None and hidden.dim() == 2:
        ends = [
            int((~part).any(0).nonzero().amax() + 1) if not part.all() else 1
            for part in hidden.split(QUERIES)
        ]
        parts = [
            attend(some, k[:end], v[:end], scale, mask[:, :end])
            for some, mask, end in zip(q.split(QUERIES), hidden.split(QUERIES), ends, strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("snd,tnd->nst", q.float(), k) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    blind = lse.isinf()
    shares = (scores - lse.masked_fill(blind, 0)[..., None]).exp()
    return torch.einsum("nst,tnd->snd", shares, v), lse.masked_fill(blind, math.inf).t()


def hidden(score: Score, row: int, s: int, t: int) -> Tensor | None:
    """What a sequence of s queries and t keys must not see."""
    mode, given = score.sparse_mode, score.atten_mask
    if s == 1 and score.query_rope is None and mode > 1:
        return None  # one query token: the argument counts for nothing
    if mode in (0, 1):
        if given is None:
            return None
        mask = given.bool()
        mask = mask[min(row, mask.shape[0] - 1)] if mask.dim() >= 3 else mask
        if s == 1 and mask.dim() == 2 and mask.shape[0] > 1:
            mask = mask[row : row + 1]
        return mask.reshape(mask.shape[-2], mask.shape[-1])[:s, :t]
    return sparse(mode, s, t, score.pre_tokens, score.next_tokens)


def sparse(mode: int, s: int, t: int, before: int, after: int) -> Tensor:
    """The mask of a sparse mode for s queries and t keys, true where not seen."""
    i, j = torch.arange(s)[:, None], torch.arange(t)[None]
    if mode == 2:
        return j > i
    i = i + (t - s)  # aligned at the last query and key
    if mode == 3:
        return j > i
    if mode == 4:
        return (j > i + after) | (j < i - before)
    raise Refused(f"sparse_mode {mode} is not emulated")


def heads_last(score: Score, x: Tensor) -> Tensor:
    """Queries as (..., s, n, d)."""
    return (
        x.unflatten(-1, (score.num_heads, -1))
        if score.layout_in == "BSH"
        else x.transpose(1, 2)
        if score.layout_in == "BNSD"
        else x
    )


def rows(score: Score, x: Tensor) -> list[Tensor]:
    """Each sequence's queries, (s, n, d)."""
    if score.layout_in == "TND":
        ends = score.actual_seq_lengths
        assert ends is not None
        return [x[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    x = heads_last(score, x)
    size = x.shape[1]
    given = score.lengths(score.actual_seq_lengths, x.shape[0], size) if size > 1 else [1] * x.shape[0]
    return [x[index, :length] for index, length in enumerate(given)]


def keys(score: Score, cache: Tensor, index: int) -> Tensor:
    """A sequence's keys or values, (t, kn, d)."""
    heads, kv = score.num_kv_heads, score.actual_seq_lengths_kv
    if score.block_table is not None:
        length = score.kv_lengths()[index]
        pages = score.block_table[index, : -(-length // score.block_size)]
        return paged_tokens(cache, pages, length, 1 if cache is score.key_rope else heads)
    if score.layout_in == "TND":
        assert kv is not None
        return cache[(kv[index - 1] if index else 0) : kv[index]]
    dense = (
        cache.unflatten(-1, (heads, -1))
        if score.layout_in == "BSH"
        else cache.transpose(1, 2)
        if score.layout_in == "BNSD"
        else cache
    )
    return dense[index, : score.lengths(kv, dense.shape[0], dense.shape[1])[index]]


def compute(score: Score) -> tuple[Tensor, Tensor]:
    """(all queries in the layout (..., s, n, d), lse)."""
    queries = rows(score, score.query)
    ropes = rows(score, score.query_rope) if score.query_rope is not None else None
    base = heads_last(score, score.query)
    out = torch.zeros(*base.shape[:-1], keys(score, score.value, 0).shape[-1])
    lse = torch.full((*base.shape[:-1], 1), math.inf)
    start = 0
    for index, q in enumerate(queries):
        k, v = keys(score, score.key, index), keys(score, score.value, index)
        if score.key_antiquant_scale is not None and score.value_antiquant_scale is not None:
            k, v = (
                k.float() * score.key_antiquant_scale.float(),
                v.float() * score.value_antiquant_scale.float(),
            )
        if ropes is not None:
            assert score.key_rope is not None
            q, k = torch.cat((q, ropes[index]), -1), torch.cat((k, keys(score, score.key_rope, index)), -1)
        need(q.shape[-1] == k.shape[-1], f"query head size {q.shape[-1]}, key's {k.shape[-1]}")
        count = q.shape[0]
        if count and k.shape[0]:
            found, logs = attend(q, k, v, score.scale, hidden(score, index, count, k.shape[0]))
            where: Any = slice(start, start + count) if score.layout_in == "TND" else (index, slice(0, count))
            out[where], lse[where] = found, logs[..., None]
        start += count
    return out, lse


OUTPUT = {  # layout -> dimensions of (b, s, n, d), or of (t, n, d)
    "BSH": (0, 1, 2, 3),
    "BSND": (0, 1, 2, 3),
    "BNSD": (0, 2, 1, 3),
    "BNSD_BSND": (0, 1, 2, 3),
    "BSH_NBSD": (2, 0, 1, 3),
    "BSND_NBSD": (2, 0, 1, 3),
    "BNSD_NBSD": (2, 0, 1, 3),
    "TND": (0, 1, 2),
    "TND_NTD": (1, 0, 2),
}


def infer(score: Score) -> tuple[Tensor, Tensor]:
    """Output and lse of one call, in its layouts."""
    check(score)
    out, lse = compute(score)
    out = out.to(score.query.dtype).permute(OUTPUT[score.input_layout]).contiguous()
    if score.input_layout == "BSH":
        out = out.flatten(-2)
    if not score.softmax_lse_flag:
        return out, torch.zeros(1)
    return out, lse.transpose(1, 2).contiguous() if score.layout_in in BATCHED else lse


@operator(V1)
def fia(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """npu_fused_infer_attention_score."""
    return infer(Score.of(query, key, value, 1, arguments))


@operator(V2)
def fia_v2(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """npu_fused_infer_attention_score_v2."""
    return infer(
        Score.of(query, key, value, 2, {V2_NAMES.get(name, name): given for name, given in arguments.items()})
    )


def into(out: list[Tensor], found: tuple[Tensor, Tensor], with_lse: bool) -> tuple[Tensor, Tensor]:
    """Copies results to the given outputs."""
    for name, (to, made) in zip(("attention", "lse"), zip(out, found, strict=True), strict=True):
        if name == "attention" or with_lse:
            need(
                to.shape == made.shape and to.dtype == made.dtype,
                f"out: {name} is {tuple(to.shape)} {to.dtype}, not {tuple(made.shape)}",
            )
            to.copy_(made)
    return out[0], out[1]


@operator(f"{V1}.out")
def fia_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    workspace: Tensor | None = None,
    out: list[Tensor],
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """npu_fused_infer_attention_score with given outputs."""
    return into(out, fia(query, key, value, **arguments), bool(arguments.get("softmax_lse_flag")))


@operator(f"{V2}.out")
def fia_v2_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    workspace: Tensor | None = None,
    out: list[Tensor],
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """npu_fused_infer_attention_score_v2 with given outputs."""
    return into(out, fia_v2(query, key, value, **arguments), bool(arguments.get("return_softmax_lse")))


@operator(
    "npu::_npu_fused_infer_attention_score_get_max_workspace",
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace",
)
def fia_workspace(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """The size of the workspace, which is empty here."""
    return torch.empty(1, dtype=torch.uint8)


SDPA_VIEWS = {
    "BNSD": lambda x, n: x.transpose(1, 2),
    "BSND": lambda x, n: x,
    "BSH": lambda x, n: x.unflatten(-1, (n, -1)),
    "SBH": lambda x, n: x.transpose(0, 1).unflatten(-1, (n, -1)),
}
SDPA_BACK = {
    "BNSD": lambda x: x.transpose(1, 2).contiguous(),
    "BSND": lambda x: x,
    "BSH": lambda x: x.flatten(2),
    "SBH": lambda x: x.flatten(2).transpose(0, 1).contiguous(),
}


@operator("npu::npu_fusion_attention")
def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2**31 - 1,
    next_tockens: int = 2**31 - 1,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    *_: Any,
    **__: Any,
) -> Any:
    """npu_fusion_attention without pages."""
    need(keep_prob == 1.0 and pse is None and prefix is None, "only inference is emulated")
    need(input_layout in SDPA_VIEWS, f"input_layout {input_layout!r} is not emulated")
    need(
        atten_mask is None or atten_mask.dim() < 4 or atten_mask.shape[1] == 1,
        "a mask for each head is not emulated",
    )
    q, k, v = (SDPA_VIEWS[input_layout](x, head_num) for x in (query, key, value))
    found = []
    for index in range(q.shape[0]):
        mask = None
        if sparse_mode > 1:
            mask = sparse(sparse_mode, q.shape[1], k.shape[1], pre_tockens, next_tockens)
        elif atten_mask is not None:
            mask = (
                atten_mask.bool()[min(index, atten_mask.shape[0] - 1), 0]
                if atten_mask.dim() == 4
                else atten_mask.bool()
            )
        found.append(attend(q[index], k[index], v[index], scale, mask)[0])
    out = SDPA_BACK[input_layout](torch.stack(found).to(query.dtype))
    none = query.new_empty(0)
    return out, none.float(), none.float(), none, 0, 0, 0


@operator("npu::npu_fusion_attention_v3")
def fusion_attention_v3(*arguments: Any, **named: Any) -> Any:
    """npu_fusion_attention_v3, which returns the same."""
    return (*fusion_attention(*arguments, **named)[:4], torch.zeros(1), torch.zeros(1))

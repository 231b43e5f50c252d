"""Doubles of attention packages that need a GPU: what they are called with is held to their documents, and
what they return is computed in float64. Of flash_attn_interface (FlashAttention 3, commit 01afd16),
flash-attn-4 4.0.0b36 and flashinfer-python 0.7.2.
"""

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)


def row(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, cap: float) -> tuple[Tensor, Tensor]:
    """Causal at the lower right corner, q [n, H, D] over k, v [L, K, D] -> [n, H, D] and natural logarithms
    of sums [n, H]."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    found = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    found = cap * (found / cap).tanh() if cap else found
    distance = (len(k) - len(q) + torch.arange(len(q))).unsqueeze(1) - torch.arange(len(k))
    is_hidden = (distance < 0) | (distance > left) if left >= 0 else distance < 0
    found = found.masked_fill(is_hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", found.softmax(-1), v), found.logsumexp(-1).T


def int32(x: Tensor, *shape: int) -> None:
    """Checks a tensor of int32."""
    assert x.dtype == torch.int32 and x.shape == shape and x.is_contiguous()


def check_caches(q: Tensor, keys: Tensor, values: Tensor, dtypes: tuple[torch.dtype, ...] = ()) -> None:
    """Checks a paged cache."""
    assert (
        q.dtype in HALVES
        and keys.dtype == values.dtype
        and keys.dtype in (q.dtype, *dtypes)
        and q.stride(-1) == 1
    )
    assert keys.dim() == values.dim() == 4 and keys.shape == values.shape and keys.shape[3] == q.shape[-1]
    assert (
        keys.stride(-1) == values.stride(-1) == 1
        and q.shape[-2] % keys.shape[2] == 0
        and q.shape[-1] % 8 == 0
    )


def flash(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    ends: Tensor | None,
    longest: int | None,
    scale: float,
    left: int,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """What both versions of FlashAttention compute."""
    check_caches(q, keys, values)
    rows = len(q) if ends is None else len(ends) - 1
    int32(lengths, rows)
    assert table.dtype == torch.int32 and table.dim() == 2 and len(table) == rows and table.stride(1) == 1
    if ends is None:
        assert q.dim() == 4
        queries = list(q)
    else:
        int32(ends, rows + 1)
        assert q.dim() == 3 and ends[-1] == len(q) and longest == int(ends.diff().max())
        queries = list(q.split(ends.diff().tolist()))
    outs, sums = [], []
    for part, pages, length in zip(queries, table.long(), lengths.tolist(), strict=True):
        used = pages[: -(-length // keys.shape[1])]
        assert len(used) * keys.shape[1] >= length, "a row longer than its page table"
        found, lse = row(part, *(x[used].flatten(0, 1)[:length] for x in (keys, values)), scale, left, cap)
        outs.append(found.to(q.dtype))
        sums.append(lse.float().T)
    return (torch.stack(outs), torch.stack(sums)) if ends is None else (torch.cat(outs), torch.cat(sums, 1))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    assert causal and cache_seqlens is not None and page_table is not None and softmax_scale is not None
    left, right = window_size
    assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
    found = flash(
        q,
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        max_seqlen_q,
        softmax_scale,
        left,
        softcap,
    )
    return found if return_softmax_lse else found[0]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: None = None,
    min_seqlen_k: None = None,
    seqused_q: None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    assert (
        causal
        and cu_seqlens_k is None
        and seqused_k is not None
        and page_table is not None
        and softmax_scale is not None
    )
    left, right = window_size
    assert (left, right) == (None, None) or (left is not None and left >= 0 and right == 0)
    out, sums = flash(
        q,
        k,
        v,
        page_table,
        seqused_k,
        cu_seqlens_q,
        max_seqlen_q,
        softmax_scale,
        -1 if left is None else left,
        softcap,
    )
    return out, sums if return_lse else None


class Wrapper:
    """What both wrappers of flashinfer do with their plans."""

    def __init__(self, float_workspace_buffer: Tensor) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and float_workspace_buffer.numel() >= 128 << 20
        self.metadata: dict[str, Any] = {}
        # of a captured wrapper: indptr, indices, last_page_len
        self.buffers: tuple[Tensor, Tensor, Tensor] | None = None

    def keep(
        self,
        queries: list[int],
        indptr: Tensor,
        indices: Tensor,
        last: Tensor,
        heads: tuple[int, int, int],
        page_size: int,
        given: dict[str, Any],
    ) -> None:
        int32(indptr, len(queries))
        int32(last, len(queries) - 1)
        int32(indices, int(indptr[-1]))
        assert (
            indptr.device.type == last.device.type == "cpu" and indptr[0] == 0 and (indptr.diff() > 0).all()
        )
        assert (
            (last >= 1).all()
            and (last <= page_size).all()
            and heads[2] in (64, 128, 256)
            and heads[0] % heads[1] == 0
        )
        assert given["q_data_type"] in HALVES and given["kv_data_type"] in (given["q_data_type"], *NARROW)
        # a graph's: the size is fixed, and what is planned goes where the kernel reads
        if self.buffers is not None:
            assert len(last) == len(self.buffers[2]) and len(indices) <= len(self.buffers[1])
            self.buffers[0].copy_(indptr)
            self.buffers[1][: len(indices)].copy_(indices)
            self.buffers[2].copy_(last)
        self.metadata = {
            "queries": queries,
            "indptr": indptr,
            "indices": indices,
            "last": last,
            "heads": heads,
            "page": page_size,
        } | given

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool = False) -> Any:
        keys, values = paged_kv_cache
        plan = self.metadata
        check_caches(q, keys, values, NARROW)
        assert q.is_contiguous() and (q.dtype, keys.dtype) == (plan["q_data_type"], plan["kv_data_type"])
        assert (
            (q.shape[1], keys.shape[2], q.shape[2]) == plan["heads"]
            and keys.shape[1] == plan["page"]
            and len(q) == plan["queries"][-1]
        )
        indptr, indices, last = self.buffers or (plan["indptr"], plan["indices"], plan["last"])
        outs, sums = [], []
        for i, count in enumerate(last.tolist()):
            used = indices[int(indptr[i]) : int(indptr[i + 1])].long()
            length = (len(used) - 1) * plan["page"] + count
            part = q[plan["queries"][i] : plan["queries"][i + 1]]
            known = [x.double()[used].flatten(0, 1)[:length] for x in (keys, values)]
            found, lse = row(part, *known, plan["sm_scale"], plan["window_left"], plan["logits_soft_cap"])
            outs.append(found)
            sums.append(lse)
        out = torch.cat(outs).to(q.dtype)
        return (out, (torch.cat(sums) / math.log(2)).float()) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer)
        assert kv_layout == "NHD"
        if use_cuda_graph:
            assert (
                paged_kv_indptr_buffer is not None
                and paged_kv_indices_buffer is not None
                and paged_kv_last_page_len_buffer is not None
            )
            self.buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            assert len(self.buffers[0]) == len(self.buffers[2]) + 1

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        given = {
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "sm_scale": sm_scale,
        }
        heads = num_qo_heads, num_kv_heads, head_dim
        self.keep(
            list(range(len(last_page_len) + 1)), indptr, indices, last_page_len, heads, page_size, given
        )


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer)
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal
        int32(qo_indptr, len(paged_kv_last_page_len) + 1)
        given = {
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "sm_scale": sm_scale,
        }
        heads = num_qo_heads, num_kv_heads, head_dim_qk
        self.keep(
            qo_indptr.tolist(),
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            heads,
            page_size,
            given,
        )


def install(patch: pytest.MonkeyPatch) -> None:
    """In place of the packages, for a test."""
    modules = {
        "flash_attn_interface": {"flash_attn_with_kvcache": flash_attn_with_kvcache},
        "flash_attn": {},
        "flash_attn.cute": {"flash_attn_varlen_func": flash_attn_varlen_func},
        "flashinfer": {
            "BatchDecodeWithPagedKVCacheWrapper": BatchDecodeWithPagedKVCacheWrapper,
            "BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper,
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)
